"""Adapters of verifiers, inspect_ai and OpenEnv: with small objects of their interfaces, and with them if installed."""

from __future__ import annotations

import abc
import asyncio
import copy
import pickle
import signal
import sys
import time
import types
from dataclasses import asdict, dataclass, field

import pytest

from jaxmarl_llm.envs.adapters.asynchronous import complete
from jaxmarl_llm.envs.adapters.inspect_ai import inspect_task
from jaxmarl_llm.envs.adapters.openenv import openenv_task, show_observation
from jaxmarl_llm.envs.adapters.verifiers import verifiers_task
from jaxmarl_llm.envs.contract import check
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message


def say(text):
    return {"solver": Action(text, tuple(text.encode()))}


def modules(monkeypatch, package, **members):
    """Modules of a package that is not installed: submodule -> its names."""
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    for name, of in members.items():
        module = types.ModuleType(f"{package}.{name}")
        vars(module).update(of)
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)


# ------------------------------------------------------------------------------------------------------- coroutines


def test_a_coroutine_is_completed_within_its_limit():
    async def after(seconds, error=None):
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return seconds

    assert complete(after(0), 5, "it") == 0
    with pytest.raises(KeyError, match="lost"):
        complete(after(0, KeyError("lost")), 5, "it")
    with pytest.raises(TimeoutError, match="a limit of its own"):
        complete(after(0, TimeoutError("a limit of its own")), 5, "it")
    with pytest.raises(TimeoutError, match=r"judge: no result within 0\.05 s"):
        complete(after(60), 0.05, "judge")

    async def blocks():
        time.sleep(0.3)  # not asynchronous at all

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="judge"):
        complete(blocks(), 0.05, "judge")
    assert complete(after(0), 5, "it") == 0 and time.monotonic() - began < 0.25  # another loop, at once


# -------------------------------------------------------------------------------------------------------- verifiers


class Client(abc.ABC):
    @abc.abstractmethod
    def setup_client(self, config): ...


class Rubric:
    """As in verifiers: a function that raises pays 0."""

    has_group_rewards = False

    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights

    async def score_rollout(self, state):
        metrics = {}
        for function in self.funcs:
            try:
                value = function(completion=state["completion"], answer=state["answer"], state=state)
                metrics[function.__name__] = float(await value if asyncio.iscoroutine(value) else value)
            except Exception:  # of any kind, as in the library
                metrics[function.__name__] = 0.0
        state["metrics"] = metrics
        state["reward"] = sum(w * v for w, v in zip(self.weights, metrics.values(), strict=True))

    async def cleanup(self, state): ...


class Group:
    """A group of rubrics, of which verifiers makes one whenever a rubric is added."""

    has_group_rewards = False

    def __init__(self, *rubrics):
        self.rubrics, self.funcs = rubrics, []

    async def score_rollout(self, state):
        reward, metrics = 0.0, {}
        for rubric in self.rubrics:
            await rubric.score_rollout(state)
            reward, metrics = reward + state["reward"], metrics | state["metrics"]
        state["reward"], state["metrics"] = reward, metrics

    async def cleanup(self, state): ...


async def exact(completion, answer, **kwargs):
    await asyncio.sleep(0)
    return completion[-1]["content"] == answer


def turns(state, **kwargs):
    return len(state["trajectory"])


def strict(completion, answer, **kwargs):
    return int(completion[-1]["content"]) == int(answer)


def nothing(**kwargs):
    return None


WORDS = [{"prompt": [{"role": "user", "content": f"word {i}?"}], "answer": str(i), "example_id": i} for i in range(12)]


class Repeat:
    """A multi-turn environment: the first completion gets the advice "again", the second one ends the episode."""

    tool_defs = None

    def __init__(self, function=exact, max_turns=2, test=None):
        self.rubric = Group(Rubric([function], [2.0]), Rubric([turns], [0.0]))
        self.max_turns, self.test = max_turns, test
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as verifiers: its own handler

    def get_dataset(self, n=-1):
        return WORDS[: n if n > 0 else None]

    def build_eval_dataset(self):
        return self.test

    def get_eval_dataset(self, n=-1):
        return self.test

    async def init_state(self, row, client, model):
        assert isinstance(client, Client)
        state = {**copy.deepcopy(row), "client": client, "trajectory": [], "final_env_response": None}
        return state | {"usage": types.MappingProxyType({})}  # a view, which has no pickle

    async def setup_state(self, state):
        state["advice"] = "again"

    async def is_completed(self, state):
        return len(state["trajectory"]) >= self.max_turns or state["final_env_response"] is not None

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        advice = [{"role": "user", "content": state["advice"]}]
        state["advice"] += "!"  # a state that changes at every step
        if last["completion"][0]["content"] == "stop":
            state["final_env_response"] = advice
        return [*last["prompt"], *last["completion"], *advice]

    async def add_model_response(self, state, messages, response):
        said = [{"role": "assistant", "content": response.message.content}]
        state["trajectory"].append({"prompt": messages, "completion": said})

    async def cleanup(self, state):
        state["completion"] = [m for step in state["trajectory"] for m in step["completion"]]


def failing():
    return Repeat(strict)


@pytest.fixture
def without_verifiers(monkeypatch):
    made = {"ResponseMessage": types.SimpleNamespace, "Response": types.SimpleNamespace}
    modules(monkeypatch, "verifiers", types=made, clients={"Client": Client})


def test_an_environment_of_verifiers_is_played(without_verifiers):
    before = signal.getsignal(signal.SIGTERM)
    task = verifiers_task(Repeat)
    assert signal.getsignal(signal.SIGTERM) is before
    check(task, "repeat")
    assert len(task.tasks) + len(task.held_out) == 12 and 0 < len(task.held_out) < 12
    env = pickle.loads(pickle.dumps(task.make))()
    assert (env.roles, env.max_turns, env.components) == (("solver",), 2, ("reward", "exact", "turns"))
    row = task.tasks[0]
    state = env.reset(0, row)
    assert env.observe(state)["solver"] == (Message("user", row["prompt"][0]["content"]),)
    for _ in range(2):  # pure: the same state twice
        after, paid, done = env.step(0, state, say("hm"))
        own = Message("assistant", "hm", tuple(b"hm"), "solver")
        assert env.observe(after)["solver"][1:] == (own, Message("user", "again")) and not paid and not done
    for text, value in ((row["answer"], 1.0), ("other", 0.0)):
        _, paid, done = env.step(0, after, say(text))
        assert done and paid == {"solver": {"reward": 2 * value, "exact": value, "turns": 2.0}}
    _, paid, done = env.step(0, state, say("stop"))  # the environment's last word
    assert done and paid["solver"]["turns"] == 1.0


def test_an_error_of_a_reward_is_shown_and_not_zero(without_verifiers):
    env = verifiers_task(failing, max_turns=1).make()
    state = env.reset(0, WORDS[3])
    assert env.step(0, state, say("3"))[1]["solver"]["reward"] == 2.0
    with pytest.raises(ValueError, match="invalid literal for int"):
        env.step(0, state, say("three"))
    env = verifiers_task(lambda: Repeat(nothing), max_turns=1).make()
    with pytest.raises(TypeError, match="float"):
        env.step(0, env.reset(0, WORDS[3]), say("3"))


def test_what_verifiers_cannot_give_ends_in_one_line(without_verifiers, monkeypatch):
    def changed(**members):
        env = Repeat()
        vars(env).update(members)
        return lambda: env

    compares = types.SimpleNamespace(has_group_rewards=True)
    for make, message in {
        object: "has no 'get_dataset'; expected a SingleTurnEnv or MultiTurnEnv of verifiers",
        changed(tool_defs=["search"]): "has tools; expected an environment whose completions are text",
        changed(rubric=compares): "its rubric compares a group",
        changed(max_turns=-1): "max_turns: expected at least 1, got -1",
        changed(test=WORDS[:2]): "eval_dataset: 2 of 2 rows are also training rows",
        changed(test=[{**WORDS[0], "example_id": 99}]): "eval_dataset: 1 of 1 rows",
    }.items():
        with pytest.raises(ConfigError, match=f"^verifiers: {message}"):
            verifiers_task(make)
    monkeypatch.setitem(sys.modules, "verifiers.clients", None)
    with pytest.raises(ConfigError, match=r"verifiers: cannot be imported .*; pip install 'verifiers<0.4'"):
        verifiers_task(Repeat)


@pytest.mark.filterwarnings("ignore")
def test_real_environments_of_verifiers():
    vf = pytest.importorskip("verifiers", exc_type=ImportError)
    if not hasattr(vf, "MultiTurnEnv"):
        pytest.skip("verifiers 0.4 has no MultiTurnEnv")
    from datasets import Dataset

    rows = Dataset.from_list([{"question": f"word {i}?", "answer": str(i)} for i in range(12)])

    class Twice(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "again"}]

    def rubric(function):
        return vf.Rubric(funcs=[function], weights=[2.0])

    task = verifiers_task(lambda: Twice(dataset=rows, rubric=rubric(exact), max_turns=2, system_prompt="Be brief."))
    check(task, "twice")
    env = task.make()
    assert env.components == ("reward", "exact", "num_turns")
    row = task.tasks[0]
    state = env.reset(0, row)
    shown = (Message("system", "Be brief."), Message("user", row["question"]))
    assert env.observe(state)["solver"] == shown
    after, paid, done = env.step(0, state, say("hm"))
    own = Message("assistant", "hm", tuple(b"hm"), "solver")
    assert env.observe(after)["solver"] == (*shown, own, Message("user", "again")) and not paid and not done
    for text, value in ((row["answer"], 1.0), ("other", 0.0)):
        _, paid, done = env.step(0, after, say(text))
        assert done and paid == {"solver": {"reward": 2 * value, "exact": value, "num_turns": 2.0}}
    env = verifiers_task(lambda: vf.SingleTurnEnv(dataset=rows, eval_dataset=None, rubric=rubric(strict))).make()
    assert env.step(0, env.reset(0, row), say(row["answer"]))[1]["solver"]["strict"] == 1.0
    with pytest.raises(ValueError, match="invalid literal for int"):
        env.step(0, env.reset(0, row), say("three"))


# --------------------------------------------------------------------------------------------------------- inspect


@dataclass
class Chat:
    role: str
    content: str

    @property
    def text(self):
        return self.content


@dataclass
class Sample:
    input: str
    target: str
    id: int | None = None
    choices: list | None = None
    metadata: dict | None = None

    def model_dump(self, mode, exclude_none):
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def model_validate(cls, fields):
        return cls(**fields)


@dataclass
class TaskState:
    model: str
    sample_id: int
    epoch: int
    input: str
    messages: list
    target: object
    choices: list | None
    metadata: dict | None
    tools: list = field(default_factory=list)
    output: object = None
    completed: bool = False


@dataclass
class Evaluation:
    """A task of inspect_ai, which makes lists of solvers and scorers."""

    scorer: list
    solver: list
    dataset: list = field(default_factory=lambda: [Sample(f"{i} + 1?", str(i + 1), id=i) for i in range(12)])


async def brief(state, generate):
    state.messages.insert(0, Chat("system", "Be brief."))
    return state


async def ask(state, generate):
    return await generate(state)


async def ask_twice(state, generate):
    return await generate(await generate(state))


async def no_question(state, generate):
    return state


async def tool(state, generate):
    state.tools.append("search")
    return state


def scored(name, value):
    async def score(state, target):
        return types.SimpleNamespace(value=value(state.output.completion, target.text))

    score.__registry_info__ = types.SimpleNamespace(name=f"package/{name}")
    return score


MATCH = scored("match", lambda said, target: "C" if said == target else "I")
CLOSE = scored("close", lambda said, target: 1 / (1 + abs(int(said or 0) - int(target))))


def evaluation():
    return Evaluation([MATCH, CLOSE], [brief, ask])


@pytest.fixture
def without_inspect(monkeypatch):
    answered = lambda model, text: types.SimpleNamespace(completion=text, message=Chat("assistant", text))
    modules(
        monkeypatch,
        "inspect_ai",
        model={
            "ModelName": str,
            "ChatMessageUser": lambda content: Chat("user", content),
            "ModelOutput": types.SimpleNamespace(from_content=answered),
        },
        solver={"TaskState": TaskState},
        scorer={"Target": lambda target: types.SimpleNamespace(text=target)},
        dataset={"Sample": Sample},
    )


def test_a_task_of_inspect_is_shown_by_its_solvers_and_scored_by_its_scorers(without_inspect):
    task = inspect_task(evaluation)
    check(task, "inspect")
    env = pickle.loads(pickle.dumps(task.make))()
    assert env.roles == ("solver",) and env.components == ("match", "close")
    row = task.held_out[0]
    state = env.reset(0, row)
    assert env.observe(state)["solver"] == (Message("system", "Be brief."), Message("user", row["input"]))
    assert env.step(0, state, say(row["target"]))[1:] == ({"solver": {"match": 1.0, "close": 1.0}}, True)
    off = str(int(row["target"]) + 1)
    assert env.step(0, state, say(off))[1] == {"solver": {"match": 0.0, "close": 0.5}}
    with pytest.raises(ValueError, match="invalid literal for int"):
        env.step(0, state, say("three"))


def test_samples_of_inspect_are_held_out_of_another_tasks_training(without_inspect):
    others = lambda: Evaluation([MATCH], [ask], [Sample(f"{i} + 2?", str(i + 2)) for i in range(5)])
    prompts = {"proposer": "{question}", "editor": "{question} Draft: {proposer}"}
    task = inspect_task(evaluation, train=others, prompts=prompts, turns=["proposer", "editor"])
    assert [len(task.tasks), len(task.held_out)] == [5, 12]
    env = task.make()
    state, _, done = env.step(0, env.reset(0, task.held_out[2]), {"proposer": Action("4", (52,))})
    assert env.observe(state) == {"editor": (Message("user", "2 + 1? Draft: 4"),)} and not done
    paid = env.step(0, state, {"editor": Action("3", (51,))})[1]
    assert paid == {role: {"match": 1.0, "close": 1.0} for role in ("proposer", "editor")}
    with pytest.raises(ConfigError, match="held_out: 12 of 12 rows show a training prompt"):
        inspect_task(evaluation, train=evaluation)


def test_what_inspect_cannot_give_ends_in_one_line(without_inspect, monkeypatch):
    odd = lambda value: Evaluation([scored("odd", lambda *_: value)], [ask])
    for make, message in {
        object: "^inspect: has no 'dataset'; expected a Task of inspect_ai",
        lambda: Evaluation([], [ask]): "^inspect: scorer: expected at least one",
        lambda: Evaluation([MATCH], [ask], []): "^inspect: dataset: no samples",
        lambda: Evaluation([MATCH], [ask_twice]): r"row \d: the solvers call the model twice; expected one call",
        lambda: Evaluation([MATCH], [tool, ask]): "the solvers give it tools; expected one call without tools",
        lambda: Evaluation([MATCH], [no_question]): "the solvers end without a call of the model",
        lambda: odd("maybe"): "scorer 'odd': the value is 'maybe'; expected a number, or C, P, I or N",
        lambda: odd([1, 2]): r"scorer 'odd': the value is \[1, 2\]",
        lambda: odd(float("nan")): "reward: returned None",
    }.items():
        with pytest.raises(ConfigError, match=message):
            inspect_task(make)
    assert inspect_task(lambda: odd({"a": "P", "b": True})).make().components == ("odd/a", "odd/b")
    monkeypatch.setitem(sys.modules, "inspect_ai.model", None)
    with pytest.raises(ConfigError, match=r"inspect_ai: cannot be imported .*; pip install inspect-ai"):
        inspect_task(evaluation)


@pytest.mark.filterwarnings("ignore")
def test_a_real_task_of_inspect():
    inspect_ai = pytest.importorskip("inspect_ai", exc_type=ImportError)
    from inspect_ai import dataset, scorer, solver

    samples = [dataset.Sample(f"{i} + 1?", target=str(i + 1)) for i in range(12)]
    template = solver.prompt_template("Q: {prompt}"), solver.generate()
    task = inspect_task(lambda: inspect_ai.Task(samples, solver=template, scorer=[scorer.match(), scorer.includes()]))
    check(task, "inspect")
    env, row = task.make(), task.held_out[0]
    state = env.reset(0, row)
    assert env.observe(state)["solver"] == (Message("user", f"Q: {row['input']}"),)
    assert env.step(0, state, say(row["target"]))[1] == {"solver": {"match": 1.0, "includes": 1.0}}
    assert env.step(0, state, say(f"{row['target']} or so"))[1] == {"solver": {"match": 0.0, "includes": 1.0}}
    choices = [dataset.Sample(f"{i}?", choices=["no", "yes"], target="AB"[i % 2]) for i in range(12)]
    made = lambda: inspect_ai.Task(choices, solver=solver.multiple_choice(), scorer=scorer.choice())
    env = inspect_task(made).make()
    state = env.reset(0, {**choices[3].model_dump(exclude_none=True), "question": "3?"})
    assert "A) no\nB) yes" in env.observe(state)["solver"][0].text
    assert env.step(0, state, say("ANSWER: B"))[1] == {"solver": {"choice": 1.0}}
    assert env.step(0, state, say("ANSWER: A"))[1] == {"solver": {"choice": 0.0}}


# --------------------------------------------------------------------------------------------------------- OpenEnv


@dataclass
class Heard:
    """An observation: total of the numbers so far."""

    total: int
    reward: float | None = None
    done: bool = False


class Sums:
    """A client of OpenEnv: numbers are added to the seed; at a multiple of 10 the episode ends with a reward."""

    clients = 0

    def __init__(self):
        type(self).clients += 1

    async def reset(self, seed):
        self.total = seed
        return self.result()

    async def step(self, action):
        await asyncio.sleep(0)
        self.total += action["add"]
        return self.result(float(self.total % 10 == 0))

    def result(self, reward=None):
        return types.SimpleNamespace(observation=Heard(self.total), reward=reward, done=reward == 1.0)


class Noisy(Sums):
    resets = 0

    async def reset(self, seed):
        type(self).resets += 1
        return await super().reset(seed + self.resets)


class Late(Noisy):
    """It repeats its resets, and not its steps."""

    resets = 0

    async def reset(self, seed):
        type(self).resets += 1
        return await Sums.reset(self, seed)

    async def step(self, action):
        return await super().step({"add": self.resets})


def add(text):
    return {"add": int(text)}


def test_an_environment_of_openenv_is_played():
    task = openenv_task(Sums, add, max_turns=3, seeds=range(1, 5), held_out=range(7, 9))
    assert [task.tasks, task.held_out] == [[{"seed": i} for i in range(1, 5)], [{"seed": 7}, {"seed": 8}]]
    env = pickle.loads(pickle.dumps(task.make))()
    assert (env.roles, env.max_turns, env.components) == (("solver",), 3, ("reward",))
    state = env.reset(0, {"seed": 4})
    assert env.observe(state)["solver"] == (Message("user", "total: 4"),)
    after, paid, done = env.step(0, state, say("3"))
    assert (after.seen, paid, done) == ("total: 7", {"solver": {"reward": 0.0}}, False)
    own = Message("assistant", "3", tuple(b"3"), "solver")
    assert env.observe(after)["solver"] == (Message("user", "total: 4"), own, Message("user", "total: 7"))
    for _ in range(2):  # pure: the same states again, in any order
        assert env.step(0, after, say("3"))[1:] == ({"solver": {"reward": 1.0}}, True)
        assert env.step(0, after, say("4"))[1:] == ({"solver": {"reward": 0.0}}, False)
        assert env.step(0, state, say("6"))[1:] == ({"solver": {"reward": 1.0}}, True)
    last = env.step(0, env.step(0, after, say("1"))[0], say("1"))
    assert last[0].seen == "total: 9" and last[2]  # the last turn


def test_a_step_that_raises_is_shown_and_costs_one_session():
    env = openenv_task(Sums, add, max_turns=3).make()
    state = env.reset(0, {"seed": 4})
    before = Sums.clients
    with pytest.raises(ValueError, match="invalid literal for int"):
        env.step(0, state, say("three"))
    assert env.step(0, state, say("6"))[1] == {"solver": {"reward": 1.0}} and Sums.clients == before + 1


def test_an_environment_that_does_not_repeat_itself_is_refused():
    with pytest.raises(ConfigError, match=r"one seed and the same actions show 'total: 1' and then 'total: 2'"):
        openenv_task(Noisy, add, max_turns=3)
    env = openenv_task(Late, add, max_turns=3).make()
    after = env.step(0, env.reset(0, {"seed": 4}), say("3"))[0]
    env.step(0, after, say("3"))
    with pytest.raises(ConfigError, match=r"'total: 7' and then 'total: 8'; expected an environment that repeats"):
        env.step(0, after, say("3"))
    with pytest.raises(ConfigError, match="openenv: has no 'reset'; expected a client of OpenEnv"):
        openenv_task(object, add, max_turns=3)
    with pytest.raises(ConfigError, match="observation: int has no default form; give show="):
        show_observation(3)


@pytest.mark.filterwarnings("ignore")
def test_a_real_client_and_server_of_openenv():
    server = pytest.importorskip("openenv.core.env_server", exc_type=ImportError)
    uvicorn = pytest.importorskip("uvicorn", exc_type=ImportError)
    import socket
    import threading

    from openenv.core import GenericEnvClient

    class Add(server.Action):
        add: int

    class Total(server.Observation):
        total: int

    class Server(server.Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            self._state = server.State(episode_id="one")
            self.total = seed
            return Total(total=self.total)

        def step(self, action, timeout_s=None, **kwargs):
            self.total += action.add
            return Total(total=self.total, reward=float(self.total % 10 == 0), done=self.total % 10 == 0)

        @property
        def state(self):
            return self._state

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = server.create_fastapi_app(Server, Add, Total)
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    threading.Thread(target=running.run, daemon=True).start()
    while not running.started:
        time.sleep(0.05)
    try:
        for make in (
            lambda: GenericEnvClient(f"http://127.0.0.1:{port}"),
            lambda: GenericEnvClient(f"http://127.0.0.1:{port}").sync(),
        ):
            env = openenv_task(make, add, max_turns=3).make()
            state = env.reset(0, {"seed": 4})
            assert env.observe(state)["solver"] == (Message("user", "total: 4"),)
            after, paid, done = env.step(0, state, say("3"))
            assert paid == {"solver": {"reward": 0.0}} and not done
            for _ in range(2):
                assert env.step(0, after, say("3"))[1:] == ({"solver": {"reward": 1.0}}, True)
            with pytest.raises(ValueError, match="invalid literal for int"):
                env.step(0, after, say("three"))
    finally:
        running.should_exit = True
