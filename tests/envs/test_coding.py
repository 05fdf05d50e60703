"""The coding environment: who reads what, rewards and feedback of a turn, demonstrations, and a real rollout."""

import dataclasses
import os
import pickle
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict, to_dict
from jaxmarl_llm.envs import registry
from jaxmarl_llm.envs.coding import cooperation_schemes
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.coding.expert import ExpertError
from jaxmarl_llm.envs.coding.rewards import Unscored
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import Action, Message
from jaxmarl_llm.rollout import make_runner
from jaxmarl_llm.rollout.plans import product
from jaxmarl_llm.sandbox import judge as sandbox
from tests.envs.test_coding_rewards import needs_sandbox
from tests.programs import AUX, GUARDED, RIGHT, TASK, UNUSED, WRAPPER, broken, run_here
from tests.toys import params, team

DATA = Path(os.environ.get("JAXMARL_DATA", "data"))
HONEST = "def sq(n):\n    return aux(n) + aux(0)\n"


@pytest.fixture(autouse=True)
def stand_in(request, monkeypatch):
    """Harmless programs run here; tests that ask for the real sandbox say so."""
    if "real" not in request.fixturenames:
        monkeypatch.setattr(sandbox, "probe", lambda unsafe=False: "stub")
        monkeypatch.setattr(sandbox, "describe", lambda unsafe=False: "sandbox: tier=stub")
        monkeypatch.setattr(sandbox, "judge", lambda program, tests, limits=None, **_: run_here(program, tests))


@pytest.fixture
def real():
    """Marks a test that runs in the real sandbox."""


def play(config, *turns, task=RIGHT):
    env, rewards, done = coding.make(config), [], False
    state = env.reset(0, task)
    for helper, main in turns:
        assert not done
        actions = {"helper": Action(helper, (1, 2)), "main": Action(main, (3,))}
        state, reward, done = env.step(0, state, actions)
        assert reward["helper"] == reward["main"] and set(reward["main"]) <= set(env.components)
        rewards.append(reward["main"])
    return state, rewards, done


def test_one_turn():
    state, (reward,), done = play(coding.Config(), (AUX, HONEST))
    assert done and reward == {
        "structure": 1.0, "syntax": 0.5, "tests": 1.0, "cooperation": 1.5, "accuracy": 1.0, "hardcoded": 0.0,
    }  # fmt: skip
    _, (reward,), _ = play(coding.Config(), (AUX, HONEST), task=TASK)
    assert reward["accuracy"] == 0.0 and reward["tests"] == pytest.approx(2 / 3)
    _, (reward,), _ = play(coding.Config(reward="parity"), (AUX, GUARDED))
    assert reward["cooperation"] == 1.5  # strict sees the wrapper
    assert play(coding.Config(), (AUX, GUARDED))[1][0]["cooperation"] == 0.5


def test_each_reads_its_own_history_only():
    config = coding.Config(max_turns=3)
    env = coding.make(config)
    first = env.observe(env.reset(0, RIGHT))
    assert list(first) == ["helper", "main"] == list(env.roles)
    for prompt in first.values():
        assert [m.speaker for m in prompt] == ["system", "user"] and RIGHT["prompt"].strip() in prompt[1].text
    state, rewards, done = play(config, ("SECRET OF HELPER", "SECRET OF MAIN"), (AUX, HONEST))
    assert not done and len(rewards) == 2 and "accuracy" not in rewards[0]
    seen = env.observe(state)
    for role, other, ids in (("helper", "MAIN", (1, 2)), ("main", "HELPER", (3,))):
        text = "\n".join(m.text for m in seen[role])
        assert f"SECRET OF {role.upper()}" in text and f"SECRET OF {other}" not in text
        assert seen[role][:2] == first[role] and seen[role][2] == Message(
            "assistant", f"SECRET OF {role.upper()}", ids, role
        )
        assert [m.speaker for m in seen[role]] == ["system", "user", "assistant", "user", "assistant", "user"]
        assert all(m.owner is None and m.ids is None for m in seen[role] if m.speaker == "user")  # no gradient


def test_steps_are_pure_and_states_pickle():
    env = pickle.loads(pickle.dumps(coding.make(coding.Config(max_turns=2, feedback="level"))))
    state = env.reset(0, RIGHT)
    actions = {"helper": Action(AUX, (1,)), "main": Action(WRAPPER, (2,))}
    one, two = env.step(0, state, actions), env.step(1, state, actions)
    assert pickle.loads(pickle.dumps(one)) == two and state == env.reset(0, RIGHT)


def test_wrong_moves_raise():
    env = coding.make(coding.Config())
    state = env.reset(0, RIGHT)
    with pytest.raises(ValueError, match="helper and main"):
        env.step(0, state, {"helper": Action(AUX, (1,))})
    state, _, _ = env.step(0, state, {"helper": Action(AUX, (1,)), "main": Action(WRAPPER, (2,))})
    with pytest.raises(ValueError, match="unfinished"):
        env.step(0, state, {"helper": Action(AUX, (1,)), "main": Action(WRAPPER, (2,))})


def test_a_lost_verdict_raises(monkeypatch):
    monkeypatch.setattr(sandbox, "judge", lambda program, tests, limits=None, **_: broken(program, tests))
    for reward in ("strict", "parity"):
        with pytest.raises(Unscored):
            play(coding.Config(reward=reward), (AUX, HONEST))


# -- feedback ----------------------------------------------------------------------------------------------------------


def told(feedback, helper, main, task=TASK, **extra):
    state, _, _ = play(coding.Config(max_turns=2, feedback=feedback, **extra), (helper, main), task=task)
    return state.helper[-1].text, state.main[-1].text


def test_plain_feedback():
    helper, main = told("plain", AUX, UNUSED)
    assert helper == "Revise your aux. Code only." and main == "Revise your sq. Code only."


def test_level_feedback():
    helper, main = told("level", AUX, UNUSED)
    assert "- aux: defined" in helper and "- sq: defined" in helper and "- syntax: fine" in main
    assert "1 of 1 shown pass" in main and "17" not in main + helper  # only the first assert is spoken of
    assert "main does not call it" in main and "use of aux" not in helper
    helper, main = told("level", AUX, UNUSED, shown_tests=0)
    assert "2 of 3 shown pass" in main and "assert candidate(4) == 17 (AssertionError" in main
    helper, main = told("level", "", "def sq(n):\n    return missing(n)\n")
    assert "- aux: missing" in helper and "NameError: name 'missing' is not defined" in main
    helper, main = told("level", AUX, "def sq(n:\n    return n\n")
    assert "main: line 1: " in helper and "tests: not run" in main
    assert "line 1" in told("level", "def aux(n:\n    return 1", UNUSED)[1]
    for text, note in {
        WRAPPER: "passes its value on", HONEST: "called and used", "def sq(n):\n    aux(n)\n    return n\n": "not used",
        "def sq(n):\n    aux(n)\n    return aux(n) + 1\n": "thrown away",
    }.items():  # fmt: skip
        assert note in told("level", AUX, text)[1]
    assert "use of aux: unknown" in told("level", AUX, UNUSED, reward="parity")[1]


def test_level_feedback_survives_any_text():
    for text in ("\x00", "\ud800", "x" * (1 << 20), "", "def sq(n):\n    raise ValueError('\\ud800' * 999)\n"):
        for message in told("level", text, text):
            assert len(message) < 3000
            message.encode("utf-8")


def advise(task, helper, main):
    return {"aux": "def aux(n):\n    return -n", "main": ""}


def refuse(task, helper, main):
    return "I cannot help."


def test_expert_feedback():
    helper, main = told("expert", AUX, UNUSED, expert=f"{__name__}:advise")
    assert "def aux(n):\n    return -n" in helper and "Revise your aux" in helper
    assert "return -n" not in main and "no change" in main
    assert told("expert", AUX, UNUSED, expert=advise) == (helper, main)
    with pytest.raises(ExpertError, match="aux and main"):
        told("expert", AUX, UNUSED, expert=refuse)
    with pytest.raises(ConfigError, match="nowhere"):
        from_dict(coding.Config, {"feedback": "expert", "expert": "nowhere:f"})


# -- configuration, tasks, demonstrations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_turns": 0}, "max_turns"), ({"cpu": 0.0}, "cpu"), ({"cpu": 9.0, "total": 1.0}, "cpu"),
        ({"count": -1}, "count"), ({"shown_tests": -1}, "shown_tests"), ({"max_timeouts": 0}, "max_timeouts"),
        ({"benchmark": "apps"}, "apps"), ({"reward": "best"}, "best"), ({"feedback": "loud"}, "loud"),
        ({"feedback": "expert"}, "expert"), ({"feedback": "expert", "expert": "http://x/v1"}, "expert_model"),
        ({"rewards": "strict"}, "did you mean 'reward'"),
    ],
)  # fmt: skip
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError) as error:
        from_dict(coding.Config, change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_configuration_round_trip():
    config = coding.Config(benchmark="mbpp", feedback="level", max_turns=2)
    assert from_dict(coding.Config, to_dict(config)) == config


def test_no_sandbox_no_rollout(monkeypatch):
    def none(unsafe=False):
        if not unsafe:
            raise sandbox.SandboxUnavailable("no sandbox to run generated code in")
        return "unsafe"

    monkeypatch.setattr(sandbox, "probe", none)
    monkeypatch.setattr(sandbox, "describe", none)
    for refuse_ in (coding.make, coding.tasks):
        with pytest.raises(ConfigError, match="no sandbox"):
            refuse_(coding.Config())
        refuse_(coding.Config(unsafe_exec=True))
    with pytest.raises(ConfigError, match="no sandbox"):
        make_runner.make_env_runner(registry.EnvConfig("coding", workers=0))


def test_tasks():
    every = coding.tasks(coding.Config(split="all"))
    assert len(every) == 24 and [t["id"] for t in every] != sorted(t["id"] for t in every)
    assert coding.tasks(coding.Config(split="all", count=5)) == every[:5]
    assert coding.tasks(coding.Config(split="all", seed=1)) != every
    splits = [{t["id"] for t in coding.tasks(coding.Config(split=s))} for s in ("train", "dev", "test")]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]
    with pytest.raises(ConfigError, match=r"config\.env\.args\.count: expected at most .*, got 99"):
        coding.tasks(coding.Config(count=99))
    with pytest.raises(ConfigError, match="states no licence"):
        coding.tasks(coding.Config(benchmark="coophumaneval"))


@pytest.mark.parametrize("benchmark", ["humaneval", "mbpp"])
def test_demonstrations_are_right(benchmark):
    config = coding.Config(benchmark=benchmark, split="all")
    tasks = coding.tasks(config)
    both = 0
    for task in tasks:
        demos = coding.demonstrations(config, [task])
        texts = {role: text for role, _, text in demos}
        assert "main" in texts and len(texts) == len(demos)
        graded = coding.grade(config, task, texts.get("helper", ""), texts["main"])
        assert graded.solved and graded.rewards["tests"] == 1.0
        if "helper" in texts:
            both += 1
            assert graded.total == 4.0
            scheme = cooperation_schemes.classify(texts["helper"], texts["main"], task["entry_point"])
            assert scheme in ("fallback", "decorator", "coordinator", "strategy_filter")
        env = coding.make(config)
        assert all(prompt == env.observe(env.reset(0, task))[role] for role, prompt, _ in demos)
    assert both >= 3


SPLITS = [  # solution -> helper, main of f
    ("def f(x):\n    '''doc'''\n    def g(y):\n        return y + 1\n    return g(x) * 2\n",
     "def aux(y):\n    return y + 1\n", "def f(x):\n    return aux(x) * 2\n"),
    ("import math\ndef g(y):\n    return math.sqrt(y)\ndef f(x):\n    return g(x) * 2\n",
     "import math\ndef aux(y):\n    return math.sqrt(y)\n", "def f(x):\n    return aux(x) * 2\n"),
    ("def g(y):\n    return g(y - 1) + 1 if y else 0\ndef f(x):\n    return g(x) * 2\n",
     "def aux(y):\n    return aux(y - 1) + 1 if y else 0\n", "def f(x):\n    return aux(x) * 2\n"),
    ("def f(x):\n    def g(y):\n        return y + x\n    return g(x) * 2\n", "", None),  # uses a name of f
    ("def g(y):\n    return y + 1\ndef f(x):\n    return g(x)\n", "", None),  # a wrapper
    ("def g(y):\n    return 1\ndef h(y):\n    return 2\ndef f(x):\n    return g(x) + h(x)\n", "", None),
    ("N = 3\ndef f(x):\n    return x * N\n", "", None),
    ("def f(x):\n    def g(y):\n        return y + 1\n    return 2 * x\n", "", None),  # not called
    ("", "", ""), ("def other(x):\n    return 1\n", "", ""),
]  # fmt: skip


@pytest.mark.parametrize("solution, helper, main", SPLITS, ids=range(len(SPLITS)))
def test_splitting_solutions(solution, helper, main):
    task = {"prompt": "def f(x):\n    '''doc'''\n", "entry_point": "f", "solution": solution}
    got = coding.split_solution(task)
    assert got[0] == helper
    if main is not None:
        assert got[1] == main
    if got[1] and solution:
        want, have = {}, {}
        exec(solution, want)
        exec(got[0] + got[1], have)
        assert [have["f"](x) for x in (0, 1, 4)] == [want["f"](x) for x in (0, 1, 4)]


def test_memory():
    prompt = coding.observe(coding.reset(0, RIGHT))["main"]
    assert coding.with_memory(prompt, []) == prompt
    longer = coding.with_memory(prompt, ["first\nline", "second"])
    assert (
        longer[0].text.endswith("Strategies that worked before:\n- first line\n- second") and longer[1:] == prompt[1:]
    )
    with pytest.raises(ValueError, match="system message"):
        coding.with_memory(prompt[1:], ["x"])
    text = coding.strategy("main", prompt, Action(HONEST * 50, ()), {"accuracy": 1.0})
    assert text.startswith("main (1.0) on 'sq(n)") and len(text) == 200 and "aux" in text
    shown = coding.demonstrations(coding.Config(), coding.tasks(coding.Config(count=1)))
    assert shown
    assert all("- a rule" in coding.with_memory(prompt, ["a rule"])[0].text for _, prompt, _ in shown)


def test_evaluation_counts_whole_checks():
    samples = [(RIGHT, [(AUX, UNUSED), ("", "x"), (AUX, HONEST)]), (TASK, [(AUX, HONEST)] * 3)]
    got = coding.evaluate(coding.Config(), samples, ks=(1, 3))
    assert got["pass@1"] == pytest.approx((2 / 3 + 0) / 2) and got["pass@3"] == 0.5 == got["pass_or_not@1"]
    assert got["accuracy@1"] == pytest.approx((1 + 2 / 3) / 2)
    assert got["max_coop@1"] == 0.0 and got["max_coop@3"] == 0.75  # no bonus where a test fails


# -- the real sandbox --------------------------------------------------------------------------------------------------


@needs_sandbox
def test_hangs_and_exits_are_failures_not_invalid(real):
    config = coding.Config(cpu=0.3, total=1.0, max_timeouts=1)
    for body in ("while n == n:\n        pass", "import time\n    time.sleep(60)", "import os\n    os._exit(0)",
                 "return [0] * 10**12", "return sq(n)", "return sq", "import sys\n    sys.exit()"):  # fmt: skip
        _, (reward,), _ = play(config, (AUX, f"def sq(n):\n    {body}\n    return aux(n) + 1\n"))
        assert reward["structure"] + reward["syntax"] >= 1.1, body
        assert reward["tests"] == reward["cooperation"] == reward["accuracy"] == 0.0


@needs_sandbox
@pytest.mark.parametrize("benchmark", ["humaneval", "mbpp"])
def test_a_rollout_through_the_arena(real, benchmark):
    cfg = registry.EnvConfig(
        "coding", {"benchmark": benchmark, "count": 3, "max_turns": 2, "feedback": "level"}, workers=1, max_prompt=512
    )
    cfg.check("config.env")
    made = make_runner.make_env_runner(cfg)
    try:
        t = team(("helper", "main"), 6)
        played = made.play(t, params(t), None, [0, 1], product(2), jax.random.key(0), Sampling(), None)
        moves = played.tree.transitions
        assert moves.played.sum() == 2 * (2 + 4) and moves.valid[moves.played].all() and played.failures == []
        assert set(moves.rewards) == {"structure", "syntax", "tests", "cooperation", "accuracy", "hardcoded"}
        for value in moves.rewards.values():
            np.testing.assert_array_equal(value[:, 0], value[:, 1])
        assert "Diagnostics:" in played.prompt_text(int(played.tree.steps.valid.sum()) - 1)
        longer = dataclasses.replace(t, roles=tuple(dataclasses.replace(r, max_new_tokens=900) for r in t.roles))
        shown = made.demonstrations(longer, 4, 0, 1)
        assert "main" in shown
    finally:
        made.close()


@needs_sandbox
@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "humaneval").is_dir(), reason="needs the full data (JAXMARL_DATA)")
@pytest.mark.parametrize("benchmark", ["humaneval", "mbpp"])
def test_all_canonical_solutions_pass(real, benchmark):
    config = coding.Config(benchmark=benchmark, data=str(DATA), split="all", cpu=10.0, total=30.0)
    for task in coding.tasks(config):
        graded = coding.grade(config, task, *coding.split_solution(task))
        assert graded.solved and graded.rewards["tests"] == 1.0 and not graded.hardcoded, task["id"]


def test_schemes_of_a_step_are_shares_for_the_log():
    task = {"entry_point": "f"}
    said = [
        {"helper": "def aux(x):\n    return x * 2\n", "main": "def f(x):\n    return aux(x)\n"},
        {"helper": "", "main": "def f(x):\n    return x\n"},
    ]
    shares = coding.episode_metrics([(task, one) for one in said])
    assert sum(shares.values()) == 1 and shares["scheme/trivial_wrapper"] == shares["scheme/trivial_empty"] == 0.5
    assert coding.episode_metrics([]) == dict.fromkeys(shares, 0.0)
