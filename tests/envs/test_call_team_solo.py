"""One agent on the calls of `call_team`: the same grades as in the team, what it reads, and demonstrations."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs.call_team import calls, env, prompts, solo
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action

CONFIG = solo.Config(conventions=True)
SIDES = {split: env.tasks(env.Config(split=split, conventions=True)) for split in ("train", "test")}
TASKS = [task for tasks in SIDES.values() for task in tasks]
ENV = solo.make(CONFIG)


def alone(task, text):
    """The components of an episode of one agent."""
    _, rewards, done = ENV.step(0, ENV.reset(0, task), {"solo": Action(text, ())})
    assert done and [*rewards] == ["solo"] and set(rewards["solo"]) == set(ENV.components)
    return rewards["solo"]


def team(task, text):
    """The components of a team whose route is right, without that of the route."""
    state, _, _ = env.step(0, env.reset(0, task), {"master": Action(task["specialist"], ())})
    _, rewards, _ = env.step(0, state, {task["specialist"]: Action(text, ())})
    return {name: value for name, value in rewards["master"].items() if name != "routed"}


@st.composite
def written(draw):
    """A task, and a text about it: a call of an offered function, near the gold one or far from it, or no call."""
    task = draw(st.sampled_from(TASKS))
    _, arguments = calls.read(solo.gold_call(task))
    keys = draw(st.sets(st.sampled_from([*arguments, "extra"])))
    values = st.sampled_from([*arguments.values(), 3, "a text", None])
    said = {key: arguments[key] if key in arguments and draw(st.booleans()) else draw(values) for key in keys}
    name = draw(st.sampled_from([task["name"], task["name"], *(f["name"] for f in task["functions"]), "other"]))
    text = draw(st.sampled_from([calls.write(name, said), solo.gold_call(task)]))
    return task, text[: draw(st.sampled_from([None, -1, 7]))]


@settings(max_examples=300, deadline=None)
@given(written())
def test_a_call_has_the_grade_that_the_team_has(case):
    assert alone(*case) == team(*case)


def test_the_gold_call_alone_earns_all():
    others = 0
    for task in TASKS:
        paid = alone(task, solo.gold_call(task))
        assert paid["call"] == paid["exact"] == paid["function"] == 1 and paid["malformed"] == 0
        assert paid["exact_unseen"] == paid["unseen_function"] == task["unseen_function"]
        assert paid["convention"] == paid["convention_met"] == bool(task["governed"])
        arguments = calls.read(solo.gold_call(task))[1]
        for name in {function["name"] for function in task["functions"]} - {task["name"]} | {"unknown"}:
            paid = alone(task, calls.write(name, arguments))
            assert paid["call"] == paid["exact"] == paid["function"] == paid["malformed"] == 0
            others += name != "unknown"
        paid = alone(task, "I would call it")
        assert paid["malformed"] == 1 and paid["call"] == paid["exact"] == paid["convention_met"] == 0
    assert others > 20 and "routed" not in ENV.components


def test_the_agent_reads_all_functions_and_no_answer():
    several = 0
    for task in TASKS:
        ((role, (system, user)),) = ENV.observe(ENV.reset(0, task)).items()
        assert role == "solo" and system == prompts.prompt(task, task["specialist"])[0]
        shown = [prompts.signature(function) for function in task["functions"]]
        assert user.text == "\n".join(["Functions:", *shown, f"Query: {task['query']}"])
        hidden = task | {"answers": {}, "governed": ["x"], "name": "x", "specialist": "x", "unseen_function": None}
        assert solo.prompt(hidden) == (system, user)
        several += len({function["owner"] for function in task["functions"]}) > 1
    assert several > 5  # functions of several specialists, which no role of the team reads together


def test_demonstrations_are_calls_without_a_convention():
    config = solo.Config(conventions=True, demonstrated=40)
    rows, first = solo.demonstrations(config, SIDES["train"]), SIDES["train"][:40]
    shown = [task for task in first if not task["governed"]]
    assert rows == [("solo", solo.prompt(task), solo.gold_call(task)) for task in shown] and 10 < len(rows) < 40
    calls_of_team = [text for role, _, text in env.demonstrations(config, SIDES["train"]) if role != "master"]
    assert [text for _, _, text in rows] == calls_of_team
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.demonstrated: expected tasks that show a call, but"):
        solo.demonstrations(config, [task for task in SIDES["train"] if task["governed"]])


def test_the_environment_has_the_tasks_of_the_team_and_a_memory():
    made = EnvConfig("call_team_solo", {"conventions": True}, workers=0, eval_tasks=8).environment(3)
    same = EnvConfig("call_team", {"conventions": True}, workers=0, eval_tasks=8).environment(3)
    assert (made.tasks, made.held_out) == (same.tasks, same.held_out) and len(made.held_out) == 8
    task = made.tasks[0]
    prompt, text = solo.prompt(task), solo.gold_call(task)
    entry = made.strategy("solo", prompt, Action(text, ()), {"call": 1.0})
    assert entry == f"{' '.join(task['query'].split())[:80]} -> {text}"[:240]
    assert entry in made.with_memory(prompt, [entry])[0].text


def test_an_episode_is_pure_and_ends():
    start = ENV.reset(0, TASKS[0])
    before = pickle.dumps(start)
    done, _, _ = ENV.step(0, start, {"solo": Action("x", ())})
    assert pickle.dumps(start) == before and pickle.loads(pickle.dumps(done)) == done
    for state, actions in ((done, {"solo": Action("x", ())}), (start, {"master": Action("x", ())})):
        with pytest.raises(ValueError, match="expected one action of 'solo'"):
            ENV.step(0, state, actions)
