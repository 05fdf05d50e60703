"""Teams: who shares which parameters, and what a bad configuration is told."""

import jax
import numpy as np
import pytest

from jaxmarl_llm.agents.team import TeamConfig, init_params, make_team
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import decoder
from jaxmarl_llm.models.lora import TARGETS

ROLES = ("master", "helper", "critic")
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
WIDE = {**SMALL, "hidden_size": 24, "num_layers": 1, "family": "qwen3", "tie_embeddings": False}
KEY = jax.random.key(5)


def config(**keys):
    return from_dict(TeamConfig, {"backbone": SMALL, "max_new_tokens": 6, **keys})


def build(roles=ROLES, **keys):
    cfg = config(**keys)
    team = make_team(cfg, roles)
    return team, init_params(cfg, team, KEY)


def equal(a, b):
    same = jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)
    return all(jax.tree.leaves(same))


def test_separate_is_a_full_copy_a_role():
    team, params = build()
    assert [(r.name, r.model, r.max_new_tokens) for r in team.roles] == [(r, r, 6) for r in ROLES]
    assert [m.name for m in team.models] == list(ROLES) and [m.base for m in team.models] == [None] * 3
    assert params["shared"] == {} and set(params["agents"]) == set(ROLES)
    own = [params["agents"][r]["params"] for r in ROLES]
    assert own[0]["embed"]["embedding"].shape == (264, 16)
    assert own[0]["layers"]["self_attn"]["q_proj"]["kernel"].shape == (2, 16, 16)
    tables = [o["embed"]["embedding"] for o in own]
    assert not any(np.array_equal(tables[i], tables[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert team.models[0].policy is team.models[1].policy is team.models[2].policy  # one compiled program
    assert team.models[0].tokenizer is team.models[1].tokenizer
    assert [team.model_index(i) for i in range(3)] == [0, 1, 2]
    assert team.models[1].variables(params)["params"] is own[1]
    assert team.role_index("critic") == 2 and team.model_of(2) is team.models[2]


def test_shared_is_one_model_for_all_roles():
    team, params = build(parameter_sharing="shared")
    assert len(team.models) == 1 and [team.model_index(i) for i in range(3)] == [0, 0, 0]
    assert [r.name for r in team.roles] == list(ROLES)
    assert params["shared"] == {} and list(params["agents"]) == ["team"]
    assert list(params["agents"]["team"]) == ["params"]
    assert team.model_of(0) is team.model_of(2)
    assert equal(params["agents"]["team"], build(roles=("solo",), parameter_sharing="shared")[1]["agents"]["team"])


def test_lora_is_one_backbone_and_an_adapter_a_role():
    team, params = build(parameter_sharing="lora", lora_rank=3, lora_targets=("q_proj", "down_proj"))
    assert list(params["shared"]) == ["backbone"] and set(params["agents"]) == set(ROLES)
    assert {m.base for m in team.models} == {"backbone"}
    adapters = [params["agents"][r] for r in ROLES]
    assert all(list(a) == ["lora"] for a in adapters)
    q = [a["lora"]["self_attn"]["q_proj"] for a in adapters]
    assert q[0]["a"].shape == (2, 16, 3) and q[0]["b"].shape == (2, 3, 16)
    assert set(adapters[0]["lora"]["self_attn"]) == {"q_proj"} and set(adapters[0]["lora"]["mlp"]) == {"down_proj"}
    assert not np.array_equal(q[0]["a"], q[1]["a"]) and not np.array_equal(q[1]["a"], q[2]["a"])
    assert not any(np.any(x["b"]) for x in q)
    for model in team.models:
        variables = model.variables(params)
        assert variables["params"] is params["shared"]["backbone"]
        assert variables["lora"] is params["agents"][model.name]["lora"]
    assert team.models[0].policy is team.models[1].policy


def test_lora_adapts_every_linear_map_by_default():
    _, params = build(roles=("a",), parameter_sharing="lora")
    lora = params["agents"]["a"]["lora"]
    assert {name for block in lora.values() for name in block} == set(TARGETS)
    assert lora["mlp"]["up_proj"]["a"].shape == (2, 16, 16)


def test_fresh_adapters_speak_as_their_backbone():
    team, params = build(roles=("a",), parameter_sharing="lora")
    model, tokens, length = team.models[0], np.arange(8, dtype=np.int32)[None], np.array([8], np.int32)
    with_adapter, _ = model.policy.prefill(model.variables(params), tokens, length)
    without, _ = model.policy.prefill({"params": params["shared"]["backbone"]}, tokens, length)
    np.testing.assert_array_equal(with_adapter, without)


def test_overrides_give_a_role_another_architecture():
    team, params = build(overrides={"helper": WIDE})
    sizes = [m.policy.config.hidden_size for m in team.models]
    assert sizes == [16, 24, 16]
    assert team.models[0].policy is team.models[2].policy is not team.models[1].policy
    helper = params["agents"]["helper"]["params"]
    assert helper["embed"]["embedding"].shape == (264, 24) and helper["lm_head"]["kernel"].shape == (24, 264)
    assert "lm_head" not in params["agents"]["master"]["params"]
    assert helper["layers"]["self_attn"]["q_norm"]["scale"].shape == (1, 8)
    assert equal(params["agents"]["master"], build()[1]["agents"]["master"])  # the others do not notice
    hidden, _ = team.models[1].policy.prefill(
        team.models[1].variables(params), np.ones((1, 4), np.int32), np.array([4], np.int32)
    )
    assert hidden.shape == (1, 24)


def test_a_larger_embedding_than_the_tokenizer_is_padding():
    team, params = build(backbone={**SMALL, "vocab_size": 300})
    policy = team.models[0].policy
    assert policy.config.vocab_size == 300 and policy.config.used_vocab == 264
    assert params["agents"]["master"]["params"]["embed"]["embedding"].shape == (300, 16)
    logits = policy.unembed(team.models[0].variables(params), np.ones((16,), np.float32))
    assert (logits[264:] <= -1e29).all() and (logits[:264] > -1e29).all()
    assert build()[0].models[0].policy.config.used_vocab is None


def test_equal_keys_give_equal_parameters_and_others_do_not():
    cfg = config()
    team = make_team(cfg, ROLES)
    assert equal(init_params(cfg, team, KEY), init_params(cfg, team, KEY))
    assert not equal(init_params(cfg, team, KEY), init_params(cfg, team, jax.random.key(6)))


def test_models_of_one_architecture_are_drawn_by_one_program(monkeypatch):
    traced, draw = [], decoder.init
    monkeypatch.setattr(decoder, "init", lambda cfg, key: traced.append(cfg) or draw(cfg, key))
    decoder.make_policy.cache_clear()
    build(overrides={"critic": WIDE})
    decoder.make_policy.cache_clear()
    assert [cfg.hidden_size for cfg in traced] == [16, 24]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"parameter_sharing": "both"}, ["config.parameter_sharing", "'both'", "separate", "shared", "lora"]),
        ({"parameter_sharing": "shared", "overrides": {"helper": SMALL}}, ["config.overrides", "'shared'"]),
        ({"parameter_sharing": "lora", "overrides": {"helper": SMALL}}, ["config.overrides", "'lora'"]),
        ({"max_new_tokens": 0}, ["config.max_new_tokens", ">= 1"]),
        ({"backbone": {**SMALL, "family": "gpt2"}}, ["config.backbone.family", "'gpt2'", "qwen3", "llama"]),
        ({"backbone": {**SMALL, "num_heads": 3, "num_kv_heads": 2}}, ["config.backbone.num_kv_heads", "3"]),
        ({"overrides": {"helper": {**SMALL, "num_kv_heads": 4}}}, ["config.overrides.helper.num_kv_heads", "2"]),
        ({"overrides": {"helper": {"layers": 3}}}, ["config.overrides.helper.layers", "num_layers"]),
        ({"overrides": {"nobody": SMALL}}, ["team.overrides", "'nobody'", *ROLES]),
        ({"backbone": {**SMALL, "vocab_size": 200}}, ["tokenizer", "264", "200"]),
        ({"parameter_sharing": "lora", "lora_targets": ("q_proj", "head")}, ["lora", "head", "q_proj"]),
        ({"parameter_sharing": "lora", "lora_rank": 0}, ["lora", "rank", "0"]),
        ({"backbone": {**SMALL, "num_kv_heads": 0}}, ["config.backbone.num_kv_heads"]),
        ({"backbone": {**SMALL, "head_dim": 7}}, ["config.backbone.head_dim"]),
        ({"backbone": {**SMALL, "num_layers": 0}}, ["config.backbone.num_layers"]),
        ({"backbone": {**SMALL, "dtype": "float33"}}, ["config.backbone.dtype"]),
    ],
)  # fmt: skip
def test_errors_are_one_line_that_names_the_key(keys, names):
    with pytest.raises(ConfigError) as caught:
        build(**keys)
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in names), message


@pytest.mark.parametrize("share", ["separate", "shared", "lora"])
def test_a_model_directory_that_is_not_there(share, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        build(parameter_sharing=share, backbone={"path": str(tmp_path / "nowhere")})
