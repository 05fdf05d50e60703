"""A master and four specialists answer users' queries on real data (the setting of JoyAgents-R1).

Protocol, ReAct style, one role a turn. The master sees the query and the reports so far and writes
``Delegate: <role>: <sub-task>`` (``{query}`` in a sub-task stands for the user's words) or ``Final: <answer>``. A
specialist sees the sub-task and its own material (``qa``: HotpotQA passages and ``Search[words]``; ``function``: the
offered BFCL schemas; ``shop``: the customer's words and the store's tools; ``math``: nothing) and writes ``Action:
<call>``, whose observation is its next user message, or ``Answer: <text>``, which the master gets as a report. A
message or call that cannot be read is answered with ``Error: ...`` and the episode goes on, for at most M turns.

Rewards; every role gets the same values (shared team return). A configuration adds them up as R = accuracy + format -
efficiency. From R_A, R_F and R_E below, ``Config.reward`` makes these three components:

    component   gated, the default            sum, the paper's literal R_A + R_F - R_E
    accuracy    R_A, last transition          R_A, last transition
    format      R_A R_F, last transition      R_F, its share on each transition
    efficiency  R_A R_E, last transition      R_E, last transition

With ``sum`` a wrong answer on the first turn earns R_F = 0.5 for certain, and a delegation that fails earns less. Teams
then stop delegating. With ``gated`` every episode without accuracy earns 0, and only what is right is worth anything:
R = R_A (1 + R_F - R_E). A memory that learns from accuracy and format then keeps what was right. With ``sum`` it keeps
what was well-formed, unless it learns from accuracy alone, as the shipped configurations state.

R_A in [0, 1]; without a ``Final`` it is 0 for qa and math:
    qa        token F1 of the final answer (SQuAD normalisation, HotpotQA's yes/no rule)
    math      1 if the final answer equals the gold answer, else 0
    function  matched / total arguments of the calls made, 1 exactly when BFCL's AST rules accept them
    shop      1 if the final database equals the gold one and the final answer holds the outputs that the task asks
              for. Otherwise half the share of the gold write calls that were made (name and arguments equal).
R_F = 0.5 (1 - unreadable messages / M): a readable message pays 0.5 / M. A final answer also pays for the turns it left
    unused, so that stalling earns nothing.
R_E = 0.3 min(1, late + cut) in [0, 0.3], a cost: late = turns beyond the reference script / (M - its length). cut =
    share of completions that the length limit ended.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import answer_rules, checks
from jaxmarl_llm.envs.assistant import shop
from jaxmarl_llm.envs.assistant.prompts import DOMAINS, ROLES, SYSTEM, Config, ask, context, database, hears, own
from jaxmarl_llm.envs.assistant.prompts import search as find
from jaxmarl_llm.envs.assistant.reference_episodes import script
from jaxmarl_llm.envs.chat import action_of, cut, reply_message, with_memory
from jaxmarl_llm.envs.chat import strategy_by_accuracy as strategy
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = [
    "DOMAINS", "ROLES", "SYSTEM", "Config", "State", "Task", "accuracy", "as_task", "ask", "demonstrations", "hears",
    "make", "play", "solvable", "strategy", "tasks", "verify", "with_memory",
]  # fmt: skip

DATASETS = {"qa": "hotpotqa", "function": "bfcl", "shop": "taubench_retail", "math": "gsm8k"}
Task = dict[str, Any]


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    needed: int  # turns of the reference script
    role: str = "master"  # acts now
    turn: int = 0
    master: Prompt = ()  # the master's conversation after its system message
    thread: Prompt = ()  # the conversation of the specialist that acts, likewise
    spent: int = 0  # turns in this delegation
    calls: tuple[tuple[str, str], ...] = ()  # accepted: (name, arguments as JSON); in the shop writes only
    overlay: shop.Overlay = shop.EMPTY
    unread: int = 0  # messages that could not be read
    truncated: int = 0
    final: str | None = None
    last: tuple[str, str, str] = ("", "", "")  # role, kind and text of the latest move


def make(config: Config) -> HostEnv:
    """Make the environment."""
    return HostEnv(
        name="assistant",
        roles=ROLES,
        max_turns=config.max_turns,
        components=("accuracy", "format", "efficiency"),
        reset=partial(reset, config),
        observe=observe,
        step=partial(step, config),
        verify=partial(verify, config),
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(config: Config, seed: int, task: Task) -> State:
    """The episode's first state. Everything is deterministic, so the seed has no effect."""
    needed = len(script(config, task)) if not task.get("asked") else 0
    return State(task, needed, master=(Message("user", f"Query: {task['query']}"),))


def observe(state: State) -> dict[str, Prompt]:
    """The prompt of the role that acts."""
    said = state.master if state.role == "master" else state.thread
    return {state.role: (Message("system", SYSTEM[state.role]), *said)}


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after a message, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the message of the role that acts.
    """
    action = action_of(state.role, actions, state.final is not None or state.turn >= config.max_turns)
    move = _lead if state.role == "master" else _specialize
    new, readable = move(config, state, action.text, reply_message(state.role, action))
    new = replace(
        new,
        turn=state.turn + 1,
        unread=state.unread + (not readable),
        truncated=state.truncated + action.truncated,
    )
    done = new.final is not None or new.turn >= config.max_turns
    reward = _paid(config, new, readable, done)
    return new, {role: dict(reward) for role in ROLES}, done


def _paid(config: Config, state: State, readable: bool, done: bool) -> dict[str, float]:
    """Components of the transition into ``state``, whose message was ``readable`` and maybe the last one (``done``)."""
    if state.task.get("asked"):  # by a person
        return {}
    unused = config.max_turns - state.turn if state.final is not None else 0
    form = config.format_reward / config.max_turns * (readable + unused)
    if not done:
        return {"format": form if config.reward == "sum" else 0.0}
    right, cost = accuracy(config, state), efficiency(config, state)
    if config.reward == "sum":
        return {"accuracy": right, "format": form, "efficiency": cost}
    whole = config.format_reward * (1.0 - state.unread / config.max_turns)
    return {"accuracy": right, "format": right * whole, "efficiency": right * cost}


def _lead(config: Config, state: State, text: str, said: Message) -> tuple[State, bool]:
    found = re.search(r"^[ \t]*(Delegate|Final):[ \t]*(.*)", text, re.M | re.S)
    kind, rest = (found[1], found[2].strip()) if found else ("", "")
    if kind == "Final" and rest:
        final = rest.split("\n")[0].strip()
        return replace(state, final=final, last=("master", "final", final)), True
    if kind == "Delegate":
        role, _, subtask = (part.strip() for part in rest.partition(":"))
        if role in DOMAINS and subtask:
            # expanded before it is cut, and the result is not searched again
            subtask = cut(subtask.replace("{query}", state.task["query"], 1), config.context_chars)
            opening = Message("user", cut(context(config, state.task, role, subtask), 2 * config.context_chars))
            return replace(
                state,
                role=role,
                master=(*state.master, said),
                thread=(opening,),
                spent=0,
                last=("master", "delegate", role),
            ), True
    hint = (
        "Error: write 'Delegate: <role>: <sub-task>' with a role among qa, function, shop, math, or 'Final: <answer>'."
    )
    return replace(state, master=(*state.master, said, Message("user", hint)), last=("master", "error", "")), False


def _specialize(config: Config, state: State, text: str, said: Message) -> tuple[State, bool]:
    role = state.role
    found = re.search(r"\b(Action|Answer):[ \t]*(.*)", text, re.S)
    kind, rest = (found[1], found[2].strip()) if found else ("", "")
    if kind == "Answer" and rest:
        return _report(config, state, rest.split("\n")[0].strip()), True
    if kind == "Action":
        state, observation, readable = _act(config, state, role, rest)
        # JSON can spell lone surrogates, which no tokenizer can encode
        observation = observation.encode("utf-8", "replace").decode("utf-8")
        moved = replace(state, last=(role, "action" if readable else "error", observation))
    else:
        moved, readable = replace(state, last=(role, "error", "")), False
        observation = f"Error: write {'' if role == 'math' else 'an Action: line or '}an Answer: line."
    if state.spent + 1 >= config.max_specialist_turns:
        return replace(_report(config, moved, "no answer"), last=moved.last), readable
    told = Message("user", f"Observation: {cut(observation, config.observation_chars)}")
    return replace(moved, thread=(*state.thread, said, told), spent=state.spent + 1), readable


def _report(config: Config, state: State, text: str) -> State:
    told = Message("user", f"Report from {state.role}: {cut(text, config.report_chars)}")
    last = (state.role, "answer", text)
    return replace(state, role="master", master=(*state.master, told), thread=(), spent=0, last=last)


def _act(config: Config, state: State, role: str, text: str) -> tuple[State, str, bool]:
    """Runs one tool call: (state, observation, could the call be read?)."""
    if role == "math":
        return state, "Error: there are no tools.", False
    if role == "qa" and (search := re.match(r"Search\[([^\]\n]{1,400})\]", text)):
        return state, find(config, state.task, search[1]), True
    call = answer_rules.parse_call(text)
    if isinstance(call, str):
        return state, f"Error: {call}", False
    name, arguments = call
    if role == "qa":
        query = arguments.get("query")
        if name != "Search" or not isinstance(query, str):
            return state, "Error: the only tool is Search[words].", True
        return state, find(config, state.task, query[:400]), True
    if role == "shop":
        observation, overlay = shop.call(database(config.data_dir), state.overlay, name, arguments)
        accepted = name in shop.WRITES and not observation.startswith("Error:")
        state = replace(state, overlay=overlay)
    else:
        observation = _check(own(state.task, "function", "functions"), name, arguments)
        accepted = not observation.startswith("Error:")
    if accepted:
        state = replace(state, calls=(*state.calls, (name, json.dumps(arguments, sort_keys=True))))
    return state, observation, True


def _check(functions: Sequence[Mapping], name: str, arguments: Mapping[str, Any]) -> str:
    schema = next((f["parameters"] for f in functions if f["name"] == name), None)
    if schema is None:
        return f"Error: unknown function {name[:60]}"
    if missing := [k for k in schema.get("required", ()) if k not in arguments]:
        return f"Error: missing argument {missing[0]}"
    if unknown := [k for k in arguments if k not in schema.get("properties", {})]:
        return f"Error: unknown argument {unknown[0][:60]}"
    return "recorded"


# -- rewards -----------------------------------------------------------------------------------------------------------


def _made(state: State) -> list[answer_rules.Call]:
    return [(name, json.loads(arguments)) for name, arguments in state.calls]


def accuracy(config: Config, state: State) -> float:
    """R_A of the episode if it ended here, in [0, 1]."""
    task, final = state.task, state.final
    match task["domain"]:
        case "qa":
            return answer_rules.token_f1(final, task["gold"]) if final is not None else 0.0
        case "math":
            # marked as an answer, so that two numbers are refused as hedging
            return float(final is not None and answer_rules.math_equal(f"Answer: {final}", task["gold"]))
        case "function":
            return answer_rules.call_score(task["functions"], _made(state), task["gold"]) if state.calls else 0.0
        case "shop":
            return _shop_accuracy(config, state)
    raise ValueError(f"task {task['id']}: unknown domain {task['domain']!r}")


def _shop_accuracy(config: Config, state: State) -> float:
    task, db = state.task, database(config.data_dir)
    wanted = shop.EMPTY
    for call in task["gold"]:
        _, wanted = shop.call(db, wanted, call["name"], call["kwargs"])
    text = (state.final or "").lower().replace(",", "")
    told = all(output.lower().replace(",", "") in text for output in task["outputs"])
    if told and shop.db_hash(db, state.overlay) == shop.db_hash(db, wanted):
        return 1.0
    writes = [(c["name"], c["kwargs"]) for c in task["gold"] if c["name"] in shop.WRITES]
    return 0.5 * answer_rules.matched_calls(_made(state), writes) / len(writes) if writes else 0.0


def efficiency(config: Config, state: State) -> float:
    """R_E, a cost in [0, efficiency_cost]."""
    late = max(0, state.turn - state.needed) / max(1, config.max_turns - state.needed)
    return config.efficiency_cost * min(1.0, late + state.truncated / max(1, state.turn))


def verify(config: Config, state: State) -> Rewards:
    """A local verdict on the latest move.

    Delegating to the right specialist earns 1, and so does a search that finds the answer or a supporting passage. An
    answer earns its accuracy as if it were final, and a call the accuracy of the calls made so far. A readable move
    earns its format: with ``gated`` in proportion to that verdict.
    """
    role, kind, text = state.last
    task, right = state.task, 0.0
    if kind == "delegate":
        right = float(text == task["domain"])
    elif kind == "answer" and role == task["domain"]:
        right = accuracy(config, replace(state, final=text))
    elif kind == "action" and role == task["domain"]:
        if role == "qa":
            clues = [task["gold"], *(f"{title}:" for title in task["supporting"])]
            right = float(any(clue.lower() in text.lower() for clue in clues))
        else:
            right = accuracy(config, state)
    elif kind == "final":
        right = accuracy(config, state)
    form = config.format_reward * (kind != "error") * (1.0 if config.reward == "sum" else right)
    return {r: {"accuracy": right, "format": form} for r in ROLES}


# -- tasks and reference episodes --------------------------------------------------------------------------------------


def tasks(config: Config) -> list[Task]:
    """Tasks ``{id, domain, query, gold, source, ...}`` of the mixture, in an order fixed by the seed.

    Left out, and counted in the log: tasks that are not ``solvable``.
    """
    weights = config.mixture or (1.0,) * len(config.domains)
    shares = [config.count * w / sum(weights) for w in weights]
    wanted = [int(s) for s in shares]
    for i in sorted(range(len(shares)), key=lambda i: wanted[i] - shares[i])[: config.count - sum(wanted)]:
        wanted[i] += 1
    chosen: list[Task] = []
    for domain, number in zip(config.domains, wanted):
        if config.count and not number:
            continue
        rows, source = loaders.load(DATASETS[domain], data_dir=config.data_dir, split=config.split, seed=config.seed)
        kept: list[Task] = []
        seen = 0
        for row in rows:
            if config.count and len(kept) == number:
                break
            seen += 1
            task = as_task(domain, row) | {"source": source}
            if solvable(config, task):
                kept.append(task)
        logging.getLogger(__name__).info("%s: %s; %d of %d read are usable", domain, source, len(kept), seen)
        if not kept or len(kept) < number:
            found = f"at most {len(kept)} of domain {domain}, the usable tasks in {source}"
            raise ConfigError(f"{checks.ARGS}.count: expected {found}, got {max(1, number)}")
        chosen += kept
    random.Random(config.seed).shuffle(chosen)
    return chosen


def as_task(domain: str, row: Mapping[str, Any]) -> Task:
    """A loader's ``row`` as a task of this environment, in one of its domains: ``domain``."""
    task: Task = {"id": row["id"], "domain": domain}
    match domain:
        case "qa":
            return task | {"query": row["question"], "gold": row["answer"]} | _only(row, "passages", "supporting")
        case "function":
            return task | {"query": row["question"], "gold": row["answers"]} | _only(row, "functions")
        case "shop":
            return task | {"query": row["instruction"], "gold": row["actions"]} | _only(row, "user_id", "outputs")
    return task | {"query": row["question"], "gold": row["answer"]} | _only(row, "solution")


def _only(row: Mapping[str, Any], *fields: str) -> Task:
    return {field: row[field] for field in fields}


def play(config: Config, task: Task) -> tuple[list[tuple[str, Prompt, str]], float]:
    """The reference episode: its samples (role, prompt, completion) and its accuracy, 0.0 if it runs out of turns."""
    samples: list[tuple[str, Prompt, str]] = []
    state, done, reached = reset(config, 0, task), False, 0.0
    for role, text in script(config, task):
        if done or role != state.role:
            return samples, 0.0
        samples.append((role, observe(state)[role], text))
        state, rewards, done = step(config, 0, state, {role: Action(text, ())})
        reached = rewards[role].get("accuracy", 0.0)
    return samples, reached


def solvable(config: Config, task: Task) -> bool:
    """Whether the reference script scores 1.0 within M turns, and an empty final answer less.

    In the shop two more conditions hold: the store accepts every gold call, and the specialist could have read all item
    ids. Some of upstream's gold calls are refused by the store's own rules.
    """
    samples, reached = play(config, task)
    if reached < 1.0 or accuracy(config, replace(reset(config, 0, task), final="")) == 1.0:
        return False
    if task["domain"] == "shop":
        overlay = shop.EMPTY
        for call in task["gold"]:
            text, overlay = shop.call(database(config.data_dir), overlay, call["name"], call["kwargs"])
            if text.startswith("Error:"):
                return False
        read = " ".join(m.text for role, prompt, _ in samples if role == "shop" for m in prompt if m.speaker == "user")
        ids = [i for c in task["gold"] for key in ("item_ids", "new_item_ids") for i in c["kwargs"].get(key, ())]
        return all(i in read for i in ids)
    return True


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) for fine-tuning of every role, from the gold answers of ``tasks``."""
    return [sample for task in tasks for sample in play(config, task)[0]]
