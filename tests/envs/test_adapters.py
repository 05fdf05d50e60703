"""Adapters: reward functions in TRL's form, PettingZoo and TextArena games, exact-match tasks."""

from __future__ import annotations

import asyncio
import pickle
import random

import numpy as np
import pytest

from jaxmarl_llm.envs import TextTask
from jaxmarl_llm.envs.adapters.exact_match import exact_match
from jaxmarl_llm.envs.adapters.pettingzoo import pettingzoo_task, show_tokens
from jaxmarl_llm.envs.adapters.textarena import textarena_task
from jaxmarl_llm.envs.adapters.trl import TRLRewards, conversation
from jaxmarl_llm.envs.contract import check
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message


def acts(**texts):
    return {role: Action(text, tuple(text.encode())) for role, text in texts.items()}


# -------------------------------------------------------------------------------------------------------------- TRL

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(12)]


def accuracy(prompts, completions, answer, **kwargs):
    return [float(a == c) for a, c in zip(answer, completions, strict=True)]


def mentions(completions, prompts, **kwargs):
    return [1.0 if p.split()[-1] in c else None for p, c in zip(prompts, completions, strict=True)]


def test_reward_functions_in_the_form_of_trl():
    rewards = TRLRewards([accuracy, mentions])
    assert rewards(ROWS[3], {"solver": "3"}) == {"accuracy": 1.0, "mentions": 1.0}
    assert rewards(ROWS[3], {"solver": "4"}) == {"accuracy": 0.0}  # None: the function does not apply
    task = TextTask(ROWS, {"solver": "{prompt}"}, rewards, components=rewards.components)
    check(task, "trl")
    env = pickle.loads(pickle.dumps(task.make))()
    assert env.components == ("accuracy", "mentions")
    row = task.tasks[0]
    _, paid, done = env.step(0, env.reset(0, row), acts(solver=row["answer"]))
    assert paid == {"solver": {"accuracy": 1.0, "mentions": 1.0}} and done


def test_conversations_and_the_role_that_is_graded():
    seen = []

    def spy(prompts, completions, **kwargs):
        seen.append((prompts, completions, kwargs))
        return [0.5]

    TRLRewards([spy], prompt="Q {answer}", role="a", chat=True)(ROWS[1], {"a": "x", "b": "y"})
    TRLRewards([spy])(ROWS[1], {"a": "x", "b": "y"})
    message = lambda role, content: [[{"role": role, "content": content}]]
    assert seen[0] == (message("user", "Q 1"), message("assistant", "x"), {"answer": ["1"]})
    assert seen[1] == (["say 1"], ["y"], {"answer": ["1"]})


CHATS = [
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"say {i}"}], "answer": str(i)}
    for i in range(12)
]


def last_word(prompts, completions, answer, **kwargs):
    return [float(p[-1]["content"].endswith(c[0]["content"])) for p, c in zip(prompts, completions, strict=True)]


def test_a_prompt_that_is_a_list_of_messages_stays_one():
    rewards = TRLRewards([last_word])
    assert rewards(CHATS[4], {"solver": "4"}) == {"last_word": 1.0}
    assert TRLRewards([last_word], prompt=lambda task: task["prompt"], chat=True)(CHATS[4], {"solver": "5"}) == {
        "last_word": 0.0
    }
    task = TextTask(CHATS, {"solver": conversation()}, rewards)
    env = pickle.loads(pickle.dumps(task.make))()
    state = env.reset(0, task.tasks[0])
    shown = env.observe(state)["solver"]
    assert shown == (Message("system", "Be brief."), Message("user", f"say {task.tasks[0]['answer']}"))
    assert env.step(0, state, acts(solver=task.tasks[0]["answer"]))[1] == {"solver": {"last_word": 1.0}}
    with pytest.raises(ConfigError, match=r"row 0: prompts\['solver'\]: .*column 'answer': expected a list of {'role'"):
        TextTask(CHATS, {"solver": conversation("answer")}, rewards)


async def judged(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


class Late:
    __name__ = "late"

    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(60)


def test_an_asynchronous_reward_function_has_a_time_limit():
    rewards = TRLRewards([judged, mentions])
    assert rewards(ROWS[3], {"solver": "313"}) == {"judged": 3.0, "mentions": 1.0}
    check(TextTask(ROWS, {"solver": "{prompt}"}, rewards, components=rewards.components), "judged")
    with pytest.raises(TimeoutError, match=r"reward 'late': no result within 0.05 s"):
        TRLRewards([Late()], seconds=0.05)(ROWS[3], {"solver": "3"})


def test_arguments_of_trl_that_a_function_requires():
    def logs(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [1])
        log_metric("length", 1.0)
        return [1.0]

    def optional(completions, completion_ids=None, trainer_state=None, log_extra=None, **kwargs):
        return [float(completion_ids is trainer_state is log_extra is None)]

    def ids(completions, completion_ids, **kwargs):
        return [0.0]

    def state(completions, *, trainer_state, **kwargs):
        return [0.0]

    assert TRLRewards([logs, optional])(ROWS[0], {"solver": ""}) == {"logs": 1.0, "optional": 1.0}
    for function, name in ((ids, "completion_ids"), (state, "trainer_state")):
        with pytest.raises(ConfigError, match=f"requires '{name}', .*; expected a default, as {name}=None") as error:
            TRLRewards([function])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("result", [[], [1.0, 2.0], 1.0, "1", {"a": 1}, ["x"]])
def test_a_reward_function_that_returns_no_list_of_one_number_is_named(result):
    def broken(prompts, completions, **kwargs):
        return result

    with pytest.raises(ConfigError, match=r"reward.*'broken'"):
        TRLRewards([broken])(ROWS[0], {"solver": ""})
    with pytest.raises(ConfigError, match="functions of different names, got broken, broken"):
        TRLRewards([broken, broken])
    for no_list in (broken, "broken", [broken, 3]):
        with pytest.raises(ConfigError, match="TRLRewards: expected a list of functions, got "):
            TRLRewards(no_list)


# ------------------------------------------------------------------------------------------------------- PettingZoo


class Discrete:
    """As gymnasium's."""

    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def contains(self, x):
        return self.start <= x < self.start + self.n


class Guess:
    """Two agents name a hidden digit, and one of them is told more at each turn. Written as PettingZoo asks."""

    possible_agents = ("left", "right")

    def __init__(self, masked=False):
        self.masked = masked

    def reset(self, seed=None, options=None):
        self.rng, self.agents = np.random.default_rng(seed), list(self.possible_agents)
        self.digit = int(self.rng.integers(1, 10))
        return self._seen(), {a: {} for a in self.agents}

    def _seen(self):
        seen = {"left": f"not {self.rng.integers(10)}", "right": np.array([self.digit, 7])}
        if self.masked:
            mask = np.arange(10) >= 4
            seen["right"] = {"observation": seen["right"], "action_mask": mask.astype(np.int8)}
        return seen

    def action_space(self, agent):
        return Discrete(10)

    def step(self, actions):
        acting = list(self.agents)
        rewards = {a: float(actions[a] == self.digit) for a in acting}
        if actions["left"] == self.digit or "right" not in acting:
            self.agents = []
        elif actions["right"] == 0:
            self.agents = ["left"]  # right leaves the game
        return self._seen(), rewards, {}, {}, {}


def test_a_pettingzoo_environment_is_played_by_completions():
    task = pettingzoo_task(Guess, max_turns=3, seeds=range(5), held_out=range(100, 103))
    check(task, "guess")
    assert [len(task.tasks), len(task.held_out)] == [5, 3]
    env = pickle.loads(pickle.dumps(task.make))()
    assert (env.roles, env.max_turns, env.components) == (("left", "right"), 3, ("reward", "illegal"))
    state = env.reset(0, {"seed": 3})
    prompts, digit = env.observe(state), Guess()
    digit.reset(seed=3)
    assert prompts["right"] == (Message("user", f"{digit.digit} 7"),) and prompts["left"][0].text.startswith("not ")
    after, paid, done = env.step(0, state, acts(left="no number", right=f"I say {digit.digit}"))
    assert paid == {"left": {"reward": 0.0, "illegal": 1.0}, "right": {"reward": 1.0, "illegal": 0.0}} and not done
    after, _, done = env.step(0, after, acts(left="11", right="0"))
    assert set(env.observe(after)) == {"left"} and not done
    _, paid, done = env.step(0, after, acts(left=str(digit.digit)))
    assert paid == {"left": {"reward": 1.0, "illegal": 0.0}} and done


def test_steps_are_pure_although_the_environment_is_random_and_mutable():
    env = pettingzoo_task(Guess, max_turns=9).make()
    state = env.reset(0, {"seed": 5})
    before = env.observe(state)
    moves = [acts(left="0", right=str(i % 3 + 1)) for i in range(6)]
    first = [env.step(0, state, move) for move in moves]
    second = [env.step(0, state, move) for move in reversed(moves)]
    shown = lambda results: [env.observe(after) for after, *_ in results]
    assert shown(first) == shown(reversed(second)) and env.observe(state) == before
    assert len({str(prompts["left"]) for prompts in shown(first)}) == 1  # one random stream for all siblings


def test_masks_tokens_and_the_last_turn():
    env = pettingzoo_task(lambda: Guess(True), max_turns=1, show=show_tokens_of_right).make()
    state = env.reset(0, {"seed": 1})
    (message,) = env.observe(state)["right"]
    assert message.speaker == "raw" and message.ids is not None and message.ids[1] == 7
    _, paid, done = env.step(0, state, acts(left="1", right="2"))  # 2 is masked
    assert paid["right"]["illegal"] == 1.0 and done
    _, paid, _ = env.step(0, state, acts(left="1", right="4"))
    assert paid["right"]["illegal"] == 0.0


def show_tokens_of_right(agent, observation):
    return show_tokens(agent, observation["observation"]) if agent == "right" else observation


def test_an_environment_of_another_kind_ends_in_one_line():
    with pytest.raises(ConfigError, match="has no 'possible_agents'; expected a PettingZoo parallel environment"):
        pettingzoo_task(object, max_turns=1)
    stuck = Guess()
    stuck.window = lambda: None  # type: ignore[attr-defined]  # a lambda has no pickle
    with pytest.raises(ConfigError, match=r"its state cannot be pickled.*define __getstate__"):
        pettingzoo_task(lambda: stuck, max_turns=1)


def test_a_real_pettingzoo_environment():
    pettingzoo, spaces = pytest.importorskip("pettingzoo"), pytest.importorskip("gymnasium").spaces

    class Real(Guess, pettingzoo.ParallelEnv):
        metadata = {"name": "real"}  # noqa: RUF012 of the other library

        def action_space(self, agent):
            return spaces.Discrete(10) if agent == "left" else spaces.Text(3, charset="abc")

        def step(self, actions):
            return Guess.step(self, {**actions, "right": len(actions.get("right", ""))})

    globals()["Real"], Real.__qualname__ = Real, "Real"
    env = pettingzoo_task(Real, max_turns=3).make()
    after, paid, _ = env.step(0, env.reset(0, {"seed": 2}), acts(left="3", right="abcd"))
    assert paid["right"]["illegal"] == 1.0 and paid["left"]["illegal"] == 0.0
    assert env.step(0, env.reset(0, {"seed": 2}), acts(left="3", right="ab"))[1]["right"]["illegal"] == 0.0
    assert set(env.observe(after)) == {"left"}


# -------------------------------------------------------------------------------------------------------- TextArena


class Race:
    """A game with the interface of TextArena: players in turn add 1 or 2; who reaches 4 wins; other moves lose."""

    def reset(self, num_players, seed=None):
        self.players, self.player, self.total = num_players, 0, random.Random(seed).randrange(2)
        self.fresh = True

    def get_observation(self):
        assert self.fresh, "an observation is handed out once"
        self.fresh = False
        return self.player, f"total {self.total}"

    def step(self, action):
        assert not self.fresh, "step before the observation"
        self.fresh = True
        self.bad = action not in ("1", "2")
        self.total += 0 if self.bad else int(action)
        if self.bad or self.total >= 4:
            return True, {}
        self.player = (self.player + 1) % self.players
        return False, {}

    def close(self):
        won = -1 if self.bad else 1
        rewards = {p: won if p == self.player else -won for p in range(self.players)}
        return rewards, {self.player: {"invalid_move": self.bad}}


def test_a_textarena_game_is_played_in_turn():
    task = textarena_task("race", players=2, max_turns=6, make_env=Race, seeds=range(4))
    check(task, "race")
    env = pickle.loads(pickle.dumps(task.make))()
    state = env.reset(0, task.tasks[0])
    total = int(env.observe(state)["player_0"][0].text.split()[1])
    for _ in range(2):  # pure: the same state twice
        after, paid, done = env.step(0, state, acts(player_0="2"))
        assert env.observe(after)["player_1"][0].text == f"total {total + 2}" and not paid and not done
    _, paid, done = env.step(0, after, acts(player_1="nonsense"))
    assert done and paid == {"player_0": {"reward": 1.0, "illegal": 0.0}, "player_1": {"reward": -1.0, "illegal": 1.0}}
    _, paid, done = env.step(0, after, acts(player_1="2"))
    assert done and paid["player_1"] == {"reward": 1.0, "illegal": 0.0}
    short = textarena_task("race", players=2, max_turns=1, make_env=Race).make()
    assert short.step(0, short.reset(0, {"seed": 0}), acts(player_0="1"))[1:] == ({}, True)


def test_a_real_textarena_game():
    pytest.importorskip("textarena", exc_type=ImportError)
    task = textarena_task("TicTacToe-v0", players=2, max_turns=9)
    check(task, "tic-tac-toe")
    env = task.make()
    state, done = env.reset(0, task.tasks[0]), False
    for move in (4, 0, 3, 1, 5):
        assert not done
        (role,) = env.observe(state)
        state, paid, done = env.step(0, state, acts(**{role: f"[{move}]"}))
    assert done and {role: values["reward"] for role, values in paid.items()} == {"player_0": 1.0, "player_1": -1.0}
    with pytest.raises(ConfigError, match="no game 'NoSuchGame-v0'"):
        textarena_task("NoSuchGame-v0", players=2, max_turns=9)


def test_without_textarena_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"textarena: cannot be imported .*; pip install textarena"):
        textarena_task("TicTacToe-v0", players=2, max_turns=9)


# ------------------------------------------------------------------------------------------------------ exact match

DOCS = [{"question": f"{i} + 1?", "answer": f"{i + 1}"} for i in range(12)]


def graded(task, text):
    env = task.make()
    return env.step(0, env.reset(0, task.tasks[0]), acts(solver=text))[1]["solver"]["accuracy"]


def test_exact_match_by_templates_fields_and_functions():
    for parts in (
        ("Q: {{question}}", "{{answer}}"),
        ("Q: {{question}}", "answer"),
        (question, lambda doc: doc["answer"]),
    ):
        task = exact_match(DOCS, *parts, until=["\n"], regexes_to_ignore=[","])
        check(task, "exact")
        doc = task.tasks[0]
        assert task.make().observe(task.make().reset(0, doc))["solver"][0].text == f"Q: {doc['question']}"
        assert graded(task, f" {doc['answer']},\nand more") == 1.0
        assert graded(task, f"{doc['answer']}0") == 0.0 and graded(task, "") == 0.0
        assert task.demonstrations is not None
        assert next(iter(task.demonstrations([doc])))[2] == doc["answer"]


def question(doc):
    return f"Q: {doc['question']}"


def test_choices_several_targets_and_filters():
    docs = [{"q": f"{i}", "choices": ["Yes.", "No."], "label": i % 2} for i in range(12)]
    task = exact_match(docs, "{{q}}", "label", ignore_case=True, ignore_punctuation=True)
    label = task.tasks[0]["label"]
    assert graded(task, ["YES", "NO"][label]) == 1.0 and graded(task, ["NO", "YES"][label]) == 0.0
    task = exact_match(docs, "{{q}}", "{{label}}")
    assert graded(task, ["Yes.", "No."][label]) == 1.0
    task = exact_match(DOCS, "{{question}}", lambda doc: [doc["answer"], "seven"], answer=r"#### (\w+)")
    assert graded(task, f"so #### 1 no #### {task.tasks[0]['answer']}") == 1.0
    assert graded(task, "#### seven") == 1.0 and graded(task, task.tasks[0]["answer"]) == 0.0


def test_a_template_without_its_field_names_the_row():
    with pytest.raises(ConfigError, match=r"row 0: prompts\['solver'\]: .*'questoin' is undefined"):
        exact_match(DOCS, "{{questoin}}", "{{answer}}")
    with pytest.raises(ConfigError, match=r"'anwser' is undefined"):
        exact_match(DOCS, "{{question}}", "{{anwser}}")
