"""Rollouts by external engines: a server with their interfaces that samples with transformers, and its failures."""

import dataclasses
import json
import time
from collections import Counter

import jax
import numpy as np
import pytest
from scipy import stats

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.generation import engine_http
from jaxmarl_llm.generation.engine import EngineConfig, EngineRequest
from jaxmarl_llm.generation.engine_http import SglangClient, VllmClient
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.external import Engines
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.plans import flat, node_wise
from jaxmarl_llm.runs import loop
from tests import toys
from tests.faulty import TASKS, Make, prompt
from tests.runs.test_health import task_of

pytest.importorskip("torch", reason="the server of these tests samples with torch")
pytest.importorskip("peft", reason="the server of these tests loads adapters with peft")
from tests.rollout import engine_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::DeprecationWarning:peft")
FEW = Sampling(top_k=3)


@pytest.fixture
def server():
    with engine_server.running() as engine:
        yield engine


def configured(server, tmp_path, sharing="shared", **changes):
    name = "backbone" if sharing == "lora" else "team"
    tiny = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
    }
    lora = {"lora_rank": 2} if sharing == "lora" else {}
    base = {
        "steps": 3,
        "batch": 4,
        "group": 4,
        "reward": {"accuracy": 1.0},
        "env": {"name": "tests.faulty", "workers": 0, "max_prompt": 40},
        "engine": {"urls": {name: server.url}, "weights": str(tmp_path / "weights"), "timeout": 20.0},
        "team": {"max_new_tokens": 3, "remat": False, "parameter_sharing": sharing, "backbone": tiny} | lora,
        "optimizer": {"learning_rate": 0.05},
        "sft": {"steps": 0},
        "run": {
            "checkpoint_every": 100,
            "eval_every": 0,
            "eval_greedy": False,
            "tensorboard": False,
            "max_logprob_diff": 0.01,
        },
    }
    return from_dict(grpo.Config, {**base, **changes})


class Said(Make):
    """Pays for the parity of what is said, so that the parameters of every step differ."""

    def step(self, seed, task, actions):
        return task, {"solver": {"accuracy": float(sum(actions["solver"].text.encode()) % 2)}}, True


def train(cfg, workdir):
    task = dataclasses.replace(task_of("", 0.0), make=Said("", 0.0))
    loop.fit(cfg, grpo.make(cfg, env=task), workdir)
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


LOADS = {
    "vllm": ("/collective_rpc", "/v1/load_lora_adapter"),
    "sglang": ("/update_weights_from_disk", "/load_lora_adapter"),
}


@pytest.mark.parametrize("client", LOADS)
@pytest.mark.parametrize("sharing", ["shared", "lora"])
def test_an_engine_samples_with_the_parameters_of_every_step(server, tmp_path, monkeypatch, sharing, client):
    """The learner's log-probs are those of transformers, step after step; an earlier policy's would be far off."""
    monkeypatch.setattr(loop, "report", lambda workdir: None)
    cfg = configured(server, tmp_path, sharing)
    rows = train(dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, client=client)), tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["logprob_diff"] for row in rows) < 1e-4
    model, adapter = LOADS[client]
    loads = Counter(path for path, _ in server.asked if path in LOADS[client])
    versions = 4  # before each of three steps, and for the last evaluation
    assert loads == ({model: 1, adapter: versions} if sharing == "lora" else {model: versions})
    left = sorted(path.name for path in (tmp_path / "weights").iterdir())
    newest = "solver-00000003" if sharing == "lora" else "team-00000003"
    assert left == sorted({newest, "backbone-00000000"} if sharing == "lora" else {newest})


def test_a_stale_engine_is_seen_in_the_log_probs(server, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "report", lambda workdir: None)
    loaded, first = engine_server.load, []

    def stale(folder):
        first.append(loaded(folder))
        return first[0]

    monkeypatch.setattr(engine_server, "load", stale)
    with pytest.raises(FloatingPointError, match=r"step 2: sampler and learner log-probs differ by \d"):
        train(configured(server, tmp_path), tmp_path / "run")


def talk():
    """Two roles act in each of two turns; a prompt is the role's name and what was said."""

    def observe(said):
        return {r: prompt(r + "".join(map(str, said)) + ">") for r in ("a", "b")}

    def step(seed, said, actions):
        said = (*said, *(actions[r].ids[0] % 3 for r in ("a", "b")))
        return said, {r: {"accuracy": float(said[-1] == said[-2])} for r in ("a", "b")}, len(said) == 4

    return HostEnv("talk", ("a", "b"), 2, ("accuracy",), lambda seed, task: (), observe, step)


def episodes(team, params, tasks, key, **more):
    """How often each pair of first tokens and their reward was played in the first and in the second turn."""
    settings = HostSettings(flat(4), FEW, max_prompt=64, **more)
    with EnvPool(talk, workers=0) as pool:
        tree = play(team, params, pool, list(range(tasks)), key, settings).tree
    moves, first = tree.transitions, tree.steps.tokens[:, 0]
    rows = np.flatnonzero(moves.played)
    return Counter((int(moves.turn[j]), *first[moves.steps[j]].tolist()) for j in rows), tree


def test_episodes_of_an_engine_have_the_distribution_of_ours(server, tmp_path):
    """Chi-square test of homogeneity over what was said in each turn; with another temperature it fails."""
    team = toys.team(max_new_tokens=1)
    params = toys.params(team)
    cfg = EngineConfig({"a": server.url, "b": server.url + "/"}, str(tmp_path))
    # One server stands for both models here, so that the second load decides: both roles play the same parameters.
    params["agents"]["b"] = params["agents"]["a"]
    made = Engines(cfg, team, 64).sampler
    ours, own = episodes(team, params, 24, jax.random.key(0))
    theirs, tree = episodes(team, params, 24, jax.random.key(1), sampler=made)
    assert tree.counts.prompt_tokens >= own.counts.prompt_tokens > 0  # an engine is asked for whole prompts
    seeds = [body["seed"] for path, body in server.asked if path == "/v1/completions"]
    assert len(seeds) == len(set(seeds)) == 24 * 2 * (1 + 4)  # of every node: two roles in one and in four states

    def p_value(one, other):
        table = np.array([[one[k], other[k]] for k in one.keys() | other.keys() if one[k] + other[k] >= 10])
        return stats.chi2_contingency(table).pvalue

    assert sum(theirs.values()) == sum(ours.values()) == 24 * 4 * 2
    assert p_value(ours, theirs) > 0.01
    colder = lambda team, params, sampling, version: made(team, params, Sampling(top_k=3, temperature=0.2), version)
    cold, _ = episodes(team, params, 24, jax.random.key(2), sampler=colder)
    assert p_value(ours, cold) < 1e-6


def test_completions_end_with_a_stop_id_or_at_the_limit(server, tmp_path):
    team = toys.team(("a",), max_new_tokens=6)
    params = toys.params(team)
    extra = toys.TOKENIZER.stop_ids[0]
    engine = Engines(EngineConfig({"a": server.url}, str(tmp_path)), team, 64)
    sampled = engine.sampler(team, params, Sampling(), 0)
    settings = HostSettings(node_wise(40), Sampling(), max_prompt=64, sampler=lambda *_: sampled)
    one = lambda: HostEnv(
        "one",
        ("a",),
        1,
        ("accuracy",),
        lambda seed, task: task,
        lambda task: {"a": prompt("say>")},
        lambda seed, task, actions: (task, {"a": {"accuracy": float(len(actions["a"].text))}}, True),
    )
    with EnvPool(one, workers=0) as pool:
        tree = play(team, params, pool, [0], jax.random.key(0), settings).tree
    steps, valid = tree.steps, np.flatnonzero(tree.steps.valid)
    for row in valid:
        ids = steps.tokens[row][: steps.length[row]]
        assert len(ids) == 6 if steps.truncated[row] else ids[-1] == extra
        assert extra not in ids[:-1]
    assert len(valid) == 40 and steps.truncated[valid].any()


def test_greedy_decoding_is_that_of_transformers(server, tmp_path):
    """Under temperature 0 both samplers write the same tokens."""
    team = toys.team(("a", "b"), max_new_tokens=5, shared=True)
    params = toys.params(team)
    made = Engines(EngineConfig({"team": server.url}, str(tmp_path)), team, 64).sampler
    trees = []
    for more in ({}, {"sampler": made}):
        settings = HostSettings(flat(2), Sampling(temperature=0.0), max_prompt=64, **more)
        with EnvPool(talk, workers=0) as pool:
            trees.append(play(team, params, pool, [0, 1], jax.random.key(0), settings).tree)
    for name in ("tokens", "length", "truncated", "node"):
        np.testing.assert_array_equal(getattr(trees[0].steps, name), getattr(trees[1].steps, name))
    np.testing.assert_array_equal(trees[0].nodes.tokens, trees[1].nodes.tokens)


REQUEST = EngineRequest("served", (1, 2, 3), 1, 2, (9,), 5, Sampling())


def choice(**changes):
    whole = {"index": 0, "token_ids": [4, 9], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "stop"}
    return {"choices": [{**whole, **changes}]}


WRONG = {
    "no tokens": ((200, choice(token_ids=None)), r"expected 'token_ids' \(vLLM 0.11 or newer\), got null"),
    "no log-probs": ((200, choice(logprobs=None)), "expected 2 log-probs, got null"),
    "a log-prob above 0": ((200, choice(logprobs={"token_logprobs": [0.5, -2.0]})), "expected 2 log-probs"),
    "too long": ((200, choice(token_ids=[4, 4, 9], logprobs={"token_logprobs": [-1, -1, -1]})), "got 3 tokens"),
    "too short": (
        (200, choice(token_ids=[4], logprobs={"token_logprobs": [-1]})),
        'got 1 tokens with finish_reason "s',
    ),
    "too few": ((200, {"choices": []}), "expected 1 completions, got 0"),
    "no list": ((200, {"error": "?"}), "expected an object with the list 'choices', got"),
    "refused": ((400, {"error": {"message": "prompt is\n too long"}}), 'HTTP 400: "prompt is too long"'),
    "no such path": ((404, {"detail": "Not Found"}), 'HTTP 404: "Not Found"$'),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_one_line(server, case):
    answer, said = WRONG[case]
    server.model, server.choices, server.broken = object(), lambda body: [], lambda path, _: answer
    with pytest.raises(RunError, match=said) as raised:
        VllmClient(server.url, 5.0).sample(REQUEST)
    assert "\n" not in str(raised.value)


def test_what_is_off_by_default_is_named(server):
    server.answer, server.broken = lambda *_: None, lambda path, _: (404, {"detail": "Not Found"})
    client = VllmClient(server.url, 5.0)
    with pytest.raises(RunError, match="VLLM_SERVER_DEV_MODE=1"):
        client.load_weights(".")
    with pytest.raises(RunError, match="--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        client.load_adapter("a", ".")


def test_a_busy_engine_is_asked_again_and_a_silent_one_for_some_time(server, monkeypatch):
    monkeypatch.setattr(engine_http, "PAUSES", (0.01,))
    answers = iter([(503, {"error": "busy"}), (429, {"error": "busy"}), (200, choice())])
    server.choices, server.broken = lambda body: [], lambda path, _: next(answers)
    assert VllmClient(server.url, 20.0).sample(REQUEST)[0].ids == (4, 9)
    server.broken = lambda path, _: (time.sleep(1.0), (200, choice()))[1]
    with pytest.raises(RunError, match=r"/v1/completions: no answer within 0.3 s: ") as raised:
        VllmClient(server.url, 0.3).sample(REQUEST)
    assert raised.value.away


def test_an_answer_of_sglang_is_checked_and_filters_are_refused(server):
    client = SglangClient(server.url, 5.0)
    told = {}
    server.answer, server.broken = lambda path, body: told.update(body or {}), lambda path, _: (200, answer)
    answer = [{"meta_info": {"output_token_logprobs": [[-1.0, 4, None], [-2.0, 9, None]]}}] * 2
    two = REQUEST._replace(samples=2, seed=2**63 - 1)
    first, second = client.sample(two)
    assert first.ids == second.ids == (4, 9) and first.logprobs.tolist() == [-1.0, -2.0] and not first.truncated
    assert [entry["sampling_seed"] for entry in told["sampling_params"]] == [2**63 - 1, 0]
    greedy = client.sample(two._replace(sampling=Sampling(temperature=0.0, top_k=3)))
    assert greedy[0].logprobs.tolist() == [0.0, 0.0]
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.9), Sampling(min_p=0.1)):
        with pytest.raises(RunError, match=r"/generate: expected config.sampling without top_k, top_p and min_p"):
            client.sample(two._replace(sampling=sampling))
    for wrong, said in {
        "[]": ([], r"/generate: expected a list of 2 completions, got \[\]"),
        "no log-probs": ([{"meta_info": {}}] * 2, "/generate: expected 'output_token_logprobs', got null"),
        "too long": ([{"meta_info": {"output_token_logprobs": [[-1, 4]] * 3}}] * 2, "got 3 tokens"),
    }.values():
        answer = wrong
        with pytest.raises(RunError, match=said):
            client.sample(two)
    answer = {"success": False, "message": "no such\n folder"}
    with pytest.raises(RunError, match=r"/update_weights_from_disk: expected 'success' of true, got .*no such"):
        client.load_weights("w")
    with pytest.raises(RunError, match=r"/load_lora_adapter: expected 'success' of true"):
        client.load_adapter("a", "w")


def opened(server, **changes):
    team = toys.team(("a", "b"), max_new_tokens=3, shared=True)
    return Engines(EngineConfig(**{"urls": {"team": server.url}, "weights": "w", **changes}), team, 64)


def test_an_engine_that_does_not_fit_is_named_before_the_first_step(server):
    with pytest.raises(ConfigError, match=r"config.engine.urls.team: expected the address of an engine for the model"):
        opened(server, urls={"other": server.url})
    with pytest.raises(ConfigError, match=r"config.engine.urls.other: no such model; the models are team"):
        opened(server, urls={"team": server.url, "other": server.url})
    server.max_model_len = 66
    with pytest.raises(ConfigError, match=r"the engine takes 66 tokens; expected config.env.max_prompt \+ .* = 67"):
        opened(server).open()
    server.max_model_len = 67
    opened(server).open()
    server.broken = lambda path, _: (200, {"data": []})
    with pytest.raises(ConfigError, match=r"config.engine.urls.team: http://.*: the engine serves no model"):
        opened(server).open()
    away = "http://127.0.0.1:9"
    with pytest.raises(
        ConfigError, match=rf"{away}: expected an engine, got /v1/models: .*; start one \(docs/engines.md"
    ):
        opened(server, urls={"team": away}).open()


def test_a_run_without_its_engine_ends_before_it_plays(server, tmp_path):
    cfg = configured(server, tmp_path, engine={"urls": {"team": "http://127.0.0.1:9"}, "weights": "w"})
    with pytest.raises(ConfigError, match="expected an engine"):
        train(cfg, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/[0-9]*"))


def test_a_token_outside_the_vocabulary_is_another_model(server, tmp_path):
    team = toys.team(("a", "b"), max_new_tokens=1, shared=True)
    engine = Engines(EngineConfig({"team": server.url}, str(tmp_path)), team, 64)
    sampler = engine.sampler(team, toys.params(team), Sampling(), 0)
    settings = HostSettings(flat(1), Sampling(), max_prompt=64, sampler=lambda *_: sampler)
    server.broken = lambda path, _: (200, choice(token_ids=[264], logprobs={"token_logprobs": [-1.0]}))
    with EnvPool(talk, workers=0) as pool, pytest.raises(RunError, match=r"token ids below 264, .*another model"):
        play(team, toys.params(team), pool, [0], jax.random.key(0), settings)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"urls": {"team": "ftp://x"}, "weights": "w"}, r"config.engine.urls.team: expected http://HOST:PORT"),
        ({"urls": {"team": "http://x:1"}}, "config.engine.weights: expected a folder that trainer and engines share"),
        ({"client": "nowhere:client"}, "config.engine.client: "),
        ({"timeout": 0.0}, "config.engine.timeout: expected > 0"),
        ({"connections": 0}, "config.engine.connections: expected >= 1"),
    ],
)
def test_settings_are_checked(changes, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**changes).check("config.engine")


def test_engines_are_for_host_environments():
    array = {"name": "matrix"}
    with pytest.raises(ConfigError, match=r"urls: expected none with the array environment 'matrix'"):
        engine = {"urls": {"team": "http://x:1"}, "weights": "w"}
        cfg = from_dict(grpo.Config, {"env": array, "reward": {"payoff": 1.0}, "engine": engine, "sft": {"steps": 0}})
        grpo.make(cfg)
    assert TASKS == 100
