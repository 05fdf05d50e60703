"""Exports of adapters beside PEFT's own arithmetic, and the byte tokenizer beside transformers."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Message
from jaxmarl_llm.models import hf_weights, peft_files
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.tokenizer import ByteTokenizer, HFTokenizer
from tests.generation.test_generate import random_params
from tests.models.test_lora import RANK, trained

SMALL = Config(
    family="qwen3", vocab_size=264, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, qk_norm=True, attention_bias=False, lora_scale=1.7,
)  # fmt: skip
TEXTS = ("", "two  words\n", "<|eos|", "naïve – 日本 🙂\x00\x7f", "".join(map(chr, range(256))))


@pytest.fixture(scope="module")
def policy():
    return make_policy(SMALL, remat=False)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads the older name
@pytest.mark.parity
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj", "gate_proj", "up_proj", "down_proj", "k_proj")])
def test_peft_has_our_logits(policy, targets, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the parity extra: pip install -e .[parity]")
    peft = pytest.importorskip("peft", reason="needs the parity extra: pip install -e .[parity]")
    from transformers import AutoModelForCausalLM

    params = random_params(policy)
    hf_weights.save(tmp_path / "base", params, SMALL, ByteTokenizer())
    ids = np.random.default_rng(0).integers(0, 264, (3, 11))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = None
    for seed, role in enumerate(("master", "solver")):
        lora = trained(params, seed, targets)
        peft_files.save(tmp_path / role, lora, SMALL, str(tmp_path / "base"))
        if model is None:
            model = peft.PeftModel.from_pretrained(base, tmp_path / role, adapter_name=role)
        else:
            model.load_adapter(tmp_path / role, role)
        model.set_adapter(role)
        with torch.no_grad():
            theirs = model(torch.tensor(ids)).logits.numpy()
        lengths = jnp.full(len(ids), ids.shape[1])
        variables = {"params": params, "lora": lora}
        with jax.default_matmul_precision("highest"):
            ours = [
                policy.unembed(variables, policy.prefill(variables, jnp.asarray(ids[:, :n]), lengths * 0 + n)[0])
                for n in range(1, ids.shape[1] + 1)
            ]
        np.testing.assert_allclose(np.stack(ours, 1), theirs, atol=1e-5)
    assert model.peft_config["solver"].r == RANK


def test_an_adapter_names_its_base_and_is_not_written_over(policy, tmp_path):
    lora = trained(random_params(policy), 0, ("q_proj",))
    peft_files.save(tmp_path / "a", lora, SMALL, "org/base")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/base" and settings["target_modules"] == ["q_proj"]
    assert settings["lora_alpha"] == pytest.approx(SMALL.lora_scale * RANK)
    with pytest.raises(ConfigError, match="a: it exists; name a new folder"):
        peft_files.save(tmp_path / "a", lora, SMALL, "org/base")


def test_transformers_reads_the_byte_tokenizer(tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    assert (theirs.pad_token_id, theirs.eos_token_id, len(theirs)) == (ours.PAD, ours.EOS, ours.vocab_size - 1)
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text
    broken = [0xE6, 0x97, 65]  # two bytes of a character of three
    assert theirs.decode(broken) == ours.decode(broken)


def test_the_byte_tokenizer_has_one_chat_template(tmp_path):
    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs = HFTokenizer(tmp_path)
    talk = [("system", "Be short."), ("user", "1+1?"), ("assistant", "2"), ("tool", "ok"), ("user", "日本")]
    for n in range(1, len(talk) + 1):
        prompt = tuple(Message(speaker, text) for speaker, text in talk[:n])
        expected = ours.render(prompt, "solver")
        assert theirs.render(prompt, "solver") == expected
        chat = [{"role": speaker, "content": text} for speaker, text in talk[:n]]
        assert theirs.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == expected


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """Recipe and state of two roles with adapters that are not zero, and the folder of their export."""
    from jaxmarl_llm.cli import export
    from jaxmarl_llm.config import from_dict
    from jaxmarl_llm.recipes import grpo

    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
    }
    team = {"parameter_sharing": "lora", "lora_rank": 2, "max_new_tokens": 1, "backbone": shape}
    env = {"name": "matrix", "eval_tasks": 2}
    cfg = from_dict(grpo.Config, {"env": env, "reward": {"payoff": 1.0}, "team": team, "sft": {"steps": 0}, "steps": 1})
    recipe = grpo.make(cfg)
    state = recipe.init(0)
    rng = np.random.default_rng(5)
    moved = lambda x: x + rng.normal(size=x.shape).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    state = dataclasses.replace(state, params={**state.params, "agents": jax.tree.map(moved, state.params["agents"])})
    monkeypatch.setattr(export, "open_run", lambda workdir, **_: (cfg, recipe, state))
    out = tmp_path / "out"
    given = {
        "models": [],
        "export_to": str(out),
        "mesh": ["1", "1", "1"],
        "best": False,
        "adapters": True,
        "push": None,
    }
    export.main(None, "run", type("Flags", (), given))
    return recipe, state, out


def test_the_command_writes_one_base_and_an_adapter_for_each_role(exported):
    recipe, state, out = exported
    names = [role.model for role in recipe.team.roles]
    assert sorted(p.name for p in out.iterdir()) == sorted([*names, "base", "team.json", "README.md"])
    for name in names:
        settings = json.loads((out / name / "adapter_config.json").read_text())
        assert settings["r"] == 2 and settings["base_model_name_or_path"] == "../base"
        assert str(out) not in "".join(file.read_text() for file in (out / name).glob("*.[jm][sd]*"))
    params, _ = hf_weights.load(out / "base")
    jax.tree.map(np.testing.assert_array_equal, params, state.params["shared"]["backbone"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads the older name
@pytest.mark.parity
def test_an_export_of_adapters_is_loaded_after_it_was_moved(exported, tmp_path, monkeypatch):
    """In the folder of an adapter, with the code of its card; and from elsewhere, with the backbone in hand."""
    torch = pytest.importorskip("torch", reason="needs the parity extra: pip install -e .[parity]")
    peft = pytest.importorskip("peft", reason="needs the parity extra: pip install -e .[parity]")
    from transformers import AutoModelForCausalLM

    recipe, state, out = exported
    out.rename(tmp_path / "elsewhere")
    ids = np.random.default_rng(0).integers(0, 256, (2, 7))
    for model in recipe.team.models:
        folder = tmp_path / "elsewhere" / model.name
        variables, policy = model.variables(state.params), model.policy
        with jax.default_matmul_precision("highest"):
            hidden = policy.prefill(variables, jnp.asarray(ids), jnp.full(len(ids), ids.shape[1]))[0]
            ours = policy.unembed(variables, hidden)
        monkeypatch.chdir(folder)
        made = {}
        exec((folder / "README.md").read_text().split("```python\n")[1].split("```")[0], made)
        monkeypatch.chdir(tmp_path)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere" / "base")
        for theirs in (made["model"], peft.PeftModel.from_pretrained(base, folder)):
            with torch.no_grad():
                logits = theirs(torch.tensor(ids)).logits[:, -1].float().numpy()
            np.testing.assert_allclose(ours, logits, atol=1e-4)
        assert made["tokenizer"]("ab", add_special_tokens=False).input_ids == list(b"ab")
