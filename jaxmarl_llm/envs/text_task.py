"""`TextTask`: data, prompts and a reward of one's own as a host environment.

    from jaxmarl_llm.envs import TextTask

    def reward(task, texts):
        return float(task["answer"] in texts["solver"])

    def make(path):
        return TextTask(path, {"solver": "What is {question}?"}, reward)

A configuration names the function: ``env.name = "package.module:make"``, ``env.args = {"path": "sums.jsonl"}``.

An episode has ``rounds`` rounds, and a round has ``turns``. At a turn one or several roles write. They read the task
and the texts of earlier turns, and never each other's text of the same turn. After the first round a function ``reply``
says what the roles read next. The reward is paid at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from absl import logging

from jaxmarl_llm.data.rows import Row, read_rows
from jaxmarl_llm.envs.chat import with_memory
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.envs.splits import fingerprint, split_contents
from jaxmarl_llm.envs.text_values import PAID, Asked, Template, Texts, ask_function, check_arity, paid, render, takes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards


class TextTask(HostTask):
    """A host environment over text, made of data, prompts and a reward.

    Args:
        data: Path of a JSONL file, an iterable of mappings, a `datasets` set, or {"train": ..., "test": ...} of these.
            Also the name of a hub data set, as ``openai/gsm8k:main:train`` (`data.hub_sets`).
        prompts: Role -> its prompt, in the order of roles. A prompt is a template such as ``"What is {question}?"``, or
            a function of (task) or (task, texts). The function returns text or a tuple of `Message`. A template may
            also name a role that acted at an earlier turn, and then shows its text.
        reward: (task, texts) -> a number for all roles, {role: number}, {component: number} for all roles, or {role:
            {component: number}}. It may take a third argument: the rounds, each {role: text}. A number is the component
            ``reward``. It has to grade any text, the empty text included. A dictionary by role has every role: 0.0, or
            no components, pays a role nothing, and None makes the joint action invalid.
        held_out: Data of the evaluation, like ``data``. Without it a quarter of the tasks is held out, by a hash of the
            prompts of the first turn.
        instructions: Text of a system message, for all roles or role -> text.
        turns: Who acts when, as ``["proposer", "editor"]`` or ``[("left", "right"), "judge"]``; None: all at once.
        reply: (task, rounds) -> what the roles that act next read: text, {role: text}, or None where the episode ends.
            It is called before every turn after the first round. The last of ``rounds`` is the one in progress.
        rounds: Rounds at most.
        demonstrations: Role -> what it should write in the first round: a template or a function, like ``prompts``.
        components: Names of reward components, where the reward of an empty text does not show all of them.
        ask: How `jaxmarl-llm chat` makes a task of a person's text: the field that holds the text, or a function from
            the text to the fields. None: the field of the prompts, where all are templates and name one field. The
            reward is not called for such a task.
        count: Rows that are read, at most.
        same_tasks: All tasks are one game, and the held-out tasks are those of training.
        name: How messages call the environment.

    Raises:
        ConfigError: A row, a prompt or the reward cannot be used; one line names the file, the line and the key.
    """

    def __init__(
        self,
        data: Any,
        prompts: Mapping[str, Template],
        reward: Callable[..., Any],
        *,
        held_out: Any = None,
        instructions: str | Mapping[str, str] | None = None,
        turns: Sequence[str | Sequence[str]] | None = None,
        reply: Callable[[Any, Sequence[Texts]], Any] | None = None,
        rounds: int = 1,
        demonstrations: Mapping[str, Template] | None = None,
        components: Sequence[str] | None = None,
        ask: str | Callable[[str], Mapping[str, Any]] | None = None,
        count: int | None = None,
        same_tasks: bool = False,
        name: str = "text_task",
    ) -> None:
        play = _Play(
            tuple(prompts), dict(prompts), reward, _turns(prompts, turns), reply, rounds, _system(prompts, instructions)
        )
        play.check()
        if held_out is None and isinstance(data, Mapping):
            data, held_out = _parts(data)
        train, test = _split(play, data, held_out, count, same_tasks)
        taught = None if demonstrations is None else partial(_demonstrations, play, dict(demonstrations))
        if taught is not None:
            _check_names("demonstrations", demonstrations or {}, tuple(prompts))
            texts = {role: text for role, _, text in taught([train[0].fields])}
        else:
            texts = {}
        shown = play.try_reward(train[0], texts)
        pays = tuple(components) if components else shown
        tasks, tests = ([row.fields for row in rows] for rows in (train, test))
        env = partial(_environment, name, play, pays)
        asked = ask_function(prompts, ask, train[0])
        super().__init__(env, tasks, tests, taught, with_memory=_with_memory, same_tasks=same_tasks, ask=asked)


class _State(NamedTuple):
    """An episode so far.

    task: fields of the row
    rounds: each a tuple of (role, text), the last one in progress
    talk: (role, prompt and own completion) of every role that wrote
    told: (role, text) of what the roles that act now read; empty in the first round
    turn: turns of this round that were played
    """

    task: Mapping[str, Any]
    rounds: tuple[tuple[tuple[str, str], ...], ...] = ((),)
    talk: tuple[tuple[str, Prompt], ...] = ()
    told: tuple[tuple[str, str], ...] = ()
    turn: int = 0

    @property
    def texts(self) -> dict[str, str]:
        """What every role wrote last."""
        return {role: text for round_ in self.rounds for role, text in round_}


@dataclass(frozen=True)
class _Play:
    """The rules of a text task; picklable where the user's functions are."""

    roles: tuple[str, ...]
    prompts: Mapping[str, Template]
    reward: Callable[..., Any]
    turns: tuple[tuple[str, ...], ...]
    reply: Callable[..., Any] | None
    rounds: int
    system: Mapping[str, str]

    def check(self) -> None:
        """Raise ConfigError where a function takes other arguments, or settings contradict each other."""
        check_arity("reward", self.reward, (2, 3), "(task, texts) or (task, texts, rounds)")
        for role, prompt in self.prompts.items():
            if callable(prompt):
                check_arity(f"prompts[{role!r}]", prompt, (1, 2), "(task) or (task, texts)")
            elif not isinstance(prompt, str):
                raise ConfigError(f"prompts[{role!r}]: expected a template or a function, got {type(prompt).__name__}")
            elif not prompt.strip() and role not in self.system:
                raise ConfigError(f"prompts[{role!r}]: empty; expected text, or a system message in instructions")
        if self.reply is not None:
            check_arity("reply", self.reply, (2,), "(task, rounds)")
        if self.rounds < 1 or (self.rounds > 1) != (self.reply is not None):
            needed = "at least 2 with reply" if self.reply else "1 without reply, which says what the roles read next"
            raise ConfigError(f"rounds: expected {needed}, got {self.rounds}")

    def first_prompt(self, role: str, task: Mapping[str, Any], texts: Texts) -> Prompt:
        """The prompt of ``role`` where it acts for the first time."""
        written = render(f"prompts[{role!r}]", self.prompts[role], task, texts)
        shown = (Message("user", written),) if isinstance(written, str) else written
        if not isinstance(shown, tuple) or not all(isinstance(m, Message) for m in shown):
            raise ConfigError(
                f"prompts[{role!r}]: returned {type(written).__name__}, expected text or a tuple of Message"
            )
        return (Message("system", self.system[role]), *shown) if role in self.system else shown

    def observe(self, state: _State) -> dict[str, Prompt]:
        """The prompts of the roles that act now."""
        talk, told, texts = dict(state.talk), dict(state.told), state.texts
        return {
            role: (*talk[role], Message("user", told[role]))
            if role in talk
            else self.first_prompt(role, state.task, texts)
            for role in self.turns[state.turn]
        }

    def step(self, seed: int, state: _State, actions: Mapping[str, Action]) -> tuple[_State, Rewards, bool]:
        """Keep the texts, and pay at the end."""
        prompts, talk = self.observe(state), dict(state.talk)
        talk |= {role: (*prompts[role], action.message(role)) for role, action in actions.items()}
        said = (*state.rounds[-1], *((role, action.text) for role, action in actions.items()))
        after = state._replace(
            rounds=(*state.rounds[:-1], said), talk=tuple(talk.items()), turn=state.turn + 1, told=()
        )
        if after.turn == len(self.turns):
            if len(after.rounds) == self.rounds:
                return after, self.pay(after), True
            after = after._replace(turn=0)
            told = self.told(after, after.rounds)
            if told is None:
                return after, self.pay(after), True
            return after._replace(rounds=(*after.rounds, ()), told=told), {}, False
        if len(after.rounds) == 1:
            return after, {}, False
        told = self.told(after, after.rounds)
        return (after, self.pay(after), True) if told is None else (after._replace(told=told), {}, False)

    def told(self, state: _State, rounds: Sequence[Any]) -> tuple[tuple[str, str], ...] | None:
        """What the roles that act next read, by ``reply``; None at the end of the episode."""
        assert self.reply is not None
        acting = self.turns[state.turn]
        got = self.reply(state.task, [dict(said) for said in rounds])
        if got is None:
            return None
        by_role = dict.fromkeys(acting, got) if isinstance(got, str) else got
        if not isinstance(by_role, Mapping) or not all(isinstance(by_role.get(role), str) for role in acting):
            raise ConfigError(
                f"reply: returned {got!r:.80}, expected text, None, or text of each of {', '.join(acting)}"
            )
        return tuple((role, by_role[role]) for role in acting)

    def pay(self, state: _State) -> dict[str, dict[str, Any]]:
        """The rewards of a finished episode, by role and component; none where a person asked."""
        if isinstance(state.task, Asked):
            return {}
        texts = {role: state.texts.get(role, "") for role in self.roles}
        rounds = [dict(said) for said in state.rounds]
        more = (rounds,) if takes(self.reward, 3) else ()
        return paid(self.reward(state.task, texts, *more), self.roles)

    def try_reward(self, row: Row, texts: Texts) -> tuple[str, ...]:
        """The components of the reward, from one call: for ``texts``, and the empty text where there is none.

        Raises:
            ConfigError: The reward raises, or returns something else than a reward.
        """
        said = tuple((role, texts.get(role, "")) for role in self.roles)
        try:
            by_role = self.pay(_State(row.fields, (said,)))
            if absent := [role for role in self.roles if role not in by_role]:
                raise ConfigError(
                    f"reward: returned {', '.join(map(repr, by_role))} and no {absent[0]!r}; expected every role, and "
                    "0.0 for a role that is paid nothing"
                )
            numbers = [value for values in by_role.values() for value in values.values()]
            if all(value is None for value in numbers):
                raise ConfigError(f"reward: returned {'None' if numbers else 'no number'}; expected {PAID}")
        except ConfigError as error:
            raise ConfigError(f"{row.where}: {error}") from None
        except Exception as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ConfigError(
                f"{row.where}: reward raised {what}; it has to grade any text, here {texts or 'the empty text'}"
            ) from error
        return tuple(dict.fromkeys(component for values in by_role.values() for component in values))


def _environment(name: str, play: _Play, components: tuple[str, ...]) -> HostEnv:
    turns = play.rounds * len(play.turns)
    return HostEnv(name, play.roles, turns, components, _reset, play.observe, play.step)


def _reset(seed: int, task: Mapping[str, Any]) -> _State:
    return _State(task)


def _with_memory(prompt: Prompt, entries: Sequence[str]) -> Prompt:
    """``prompt`` with memory entries in its system message, which is made where there is none."""
    if entries and prompt[0].speaker != "system":
        prompt = (Message("system", ""), *prompt)
    return with_memory(prompt, entries)


def _turns(prompts: Any, turns: Sequence[str | Sequence[str]] | None) -> tuple[tuple[str, ...], ...]:
    """Who acts at each turn of a round, checked: every role acts once."""
    if not isinstance(prompts, Mapping) or not prompts:
        raise ConfigError(f"prompts: expected {{role: prompt}} with at least one role, got {prompts!r:.60}")
    roles = tuple(prompts)
    made = (roles,) if turns is None else tuple((turn,) if isinstance(turn, str) else tuple(turn) for turn in turns)
    acting = [role for turn in made for role in turn]
    _check_names("turns", acting, roles)
    if sorted(acting) != sorted(roles):
        twice = next((role for role in acting if acting.count(role) > 1), None)
        absent = next((role for role in roles if role not in acting), None)
        what = f"{twice!r} acts twice; use rounds and reply" if twice else f"{absent!r} has a prompt and never acts"
        raise ConfigError(f"turns: {what}; every role acts once a round")
    return made


def _system(prompts: Mapping[str, Any], instructions: str | Mapping[str, str] | None) -> dict[str, str]:
    """Role -> text of its system message."""
    if instructions is None or isinstance(instructions, str):
        return {} if instructions is None else dict.fromkeys(prompts, instructions)
    _check_names("instructions", instructions, tuple(prompts))
    return dict(instructions)


def _check_names(what: str, given: Any, roles: tuple[str, ...]) -> None:
    """Raise ConfigError where ``given`` names something that is no role."""
    for role in given:
        if role not in roles:
            raise ConfigError(f"{what}: no role {role!r}; the roles are {', '.join(roles)}")


def _parts(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """Training and held-out data of {"train": ..., "test": ...}."""
    test = next((name for name in ("test", "validation") if name in data), None)
    if "train" not in data:
        raise ConfigError(f"data: expected the parts train and test, got {', '.join(map(repr, data)) or 'none'}")
    return data["train"], data[test] if test else None


def _split(play: _Play, data: Any, held_out: Any, count: int | None, same_tasks: bool) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows: each row once, and no prompt of the first turn on both sides."""
    train, contents = _usable(play, read_rows(data, count))
    if same_tasks and held_out is None:
        return train, train
    if held_out is None:
        mask = split_contents(contents)
        if mask is None:
            where = f"{train[0].where} to {train[-1].where}"
            raise ConfigError(
                f"{where}: all rows show one prompt, so none can be held out; give held_out or same_tasks"
            )
        return [r for r, out in zip(train, mask) if not out], [r for r, out in zip(train, mask) if out]
    test, shown = _usable(play, read_rows(held_out, count, "held_out"))
    first = dict(zip(reversed(contents), reversed(train)))
    both = [(first[content], row) for content, row in zip(shown, test) if content in first]
    if both and not same_tasks:
        a, b = both[0]
        raise ConfigError(
            f"held_out: {len(both)} of {len(test)} rows show a training prompt; first {b.where} and {a.where}"
        )
    return train, test


def _usable(play: _Play, rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Rows without repetitions, and what each shows at the first turn. Every later template is tried too."""
    kept: list[Row] = []
    contents, seen = [], set()
    for row in rows:
        clash = [role for role in play.roles if role in row.fields]
        if clash:
            raise ConfigError(f"{row.where}: the field {clash[0]!r} has the name of a role; rename one of them")
        key = repr(fingerprint(row.fields))
        if key in seen:
            continue
        seen.add(key)
        contents.append(repr([_tried(play, role, row, {}) for role in play.turns[0]]))
        before = dict.fromkeys(play.turns[0], "")
        for turn in play.turns[1:]:
            for role in turn:
                if isinstance(play.prompts[role], str):
                    _tried(play, role, row, before)
            before |= dict.fromkeys(turn, "")
        kept.append(row)
    if len(kept) < len(rows):
        logging.warning("%d of %d rows repeat an earlier row: left out", len(rows) - len(kept), len(rows))
    return kept, contents


def _tried(play: _Play, role: str, row: Row, texts: Texts) -> Prompt:
    """The first prompt of ``role``; an error names the row."""
    try:
        return play.first_prompt(role, row.fields, texts)
    except ConfigError as error:
        raise ConfigError(f"{row.where}: {error}") from None


def _demonstrations(
    play: _Play, templates: Mapping[str, Template], tasks: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion) of the first round of every task; a later role reads the demonstrated texts."""
    out = []
    for task in tasks:
        texts: dict[str, str] = {}
        for turn in play.turns:
            said = {
                role: str(render(f"demonstrations[{role!r}]", templates[role], task, texts))
                for role in turn
                if role in templates
            }
            read = {**dict.fromkeys(play.roles, ""), **texts}
            out += [(role, play.first_prompt(role, task, read), text) for role, text in said.items()]
            texts |= said
    return out
