"""The split maze through text: what agents read, what replies are read as, and a grader that nothing makes raise."""

import dataclasses
import functools
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs import registry
from jaxmarl_llm.envs.maze import array as maze
from jaxmarl_llm.envs.maze import text as maze_text
from jaxmarl_llm.envs.maze.language import agrees, proposals, refuses
from jaxmarl_llm.envs.text_adapter import board
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action

SMALL = dict(size=3, shortest=2, longest=4, moves=3, tasks=8)
CONFIGS = {
    "pair": maze_text.Config(**SMALL),
    "solo": maze_text.Config(**SMALL, agents=1),
    "random": maze_text.Config(**SMALL, agents=3, topology="random"),
}
played = functools.cache(lambda name: (maze_text.make(CONFIGS[name]), board(maze.make(CONFIGS[name].board), 1)))
WALLS = np.array([[0, 0, 1], [1, 0, 0], [1, 1, 0]])  # one way: R D R D
ROOM = {
    "walls": WALLS.reshape(-1),
    "owner": np.array([0, 1, 0, 1, 0, 1, 0, 1, 0]),
    "start": 0,
    "goal": 8,
    "distance": maze.distances(WALLS[None] == 1, np.array([8])).reshape(-1),
}


@pytest.mark.parametrize(
    "reply, moves",
    [
        ("Let's go right.", "R"),
        ("I'd move down, then right and right again", "DRR"),
        ("Head north", "U"),
        ("→→↓", "RRD"),
        ("RRD", "RRD"),
        ("R, D, R", "RDR"),
        ("Move: down", "D"),
        ("I prefer left.\n**Move:** right", "R"),
        ("Move: up\nMove: R", "R"),
        ("Move: what?\nlet us go up", "U"),
        ("(1, 1) -> (1, 2) -> (2, 2)", "RD"),
        ("go to (1,2), then down", "RD"),
        ("right to (1, 2), then (2, 2)", "RD"),
        ("The cell to the right is a wall, so go down", "D"),
        ("don't go up, go left", "L"),
        ("don’t go up", ""),
        ("Not up; left?", "L"),
        ("You're right, up it is", "U"),
        ("We have 3 moves left. Down!", "D"),
        ("up to you", ""),
        ("I see a wall at (1, 2)", ""),
        ("we jump to (3, 3)", ""),
        ("dull", ""),
        ("", ""),
    ],
)
def test_proposals(reply, moves):
    assert "".join(proposals(reply, 0, 3)) == moves


def test_consent_and_refusal():
    yes, no = (
        ["OK", "Yes, agreed.", "sounds good!", "You're right", "👍"],
        ["no", "Wait, that's a wall", "I don't agree"],
    )
    assert all(agrees(t) and not refuses(t) for t in yes) and all(refuses(t) and not agrees(t) for t in no)
    assert not any(f(t) for f in (agrees, refuses) for t in ("", "hm", "the goal is far"))


TALKS = {
    "both name each move": (
        [("a", "right"), ("b", "right"), ("a", "down"), ("b", "go down"), ("a", "right"), ("b", "R"), ("a", "down"),
         ("b", "down")],
        (True, 1.0, "RDRD", 0),
    ),
    "one leads, the other consents": (
        [("a", "I suggest right"), ("b", "Okay!"), ("a", "now down"), ("b", "Agreed."), ("b", "right"), ("a", "sure"),
         ("b", "down"), ("a", "yes")],
        (True, 1.0, "RDRD", 0),
    ),
    "a plan, half of it agreed": (
        [("a", "right, down, left"), ("b", "I'd go right, then down, then right")],
        (False, 0.5, "RD", 0),
    ),
    "a wall ends all plans": (
        [("a", "down then right"), ("b", "down then right"), ("a", "right"), ("b", "right")],
        (False, 0.25, "R", 1),
    ),
    "a refusal": ([("a", "right"), ("b", "No, wait"), ("b", "ok")], (False, 0.25, "R", 0)),
    "nobody answers": ([("a", "right"), ("a", "I said right")], (False, 0.0, "", 0)),
    "they never agree": ([("a", "right"), ("b", "down"), ("a", "right"), ("b", "down")], (False, 0.0, "", 0)),
    "a change of mind": ([("a", "down"), ("b", "right"), ("a", "right then")], (False, 0.25, "R", 0)),
    "a third voice": ([("a", "right"), ("b", "right"), ("judge", "up"), ("a", "D"), ("b", "D")], (False, 0.5, "RD", 0)),
    "back home": ([("a", "right, left"), ("b", "yes")], (False, 0.0, "RL", 0)),
    "noise": ([("a", "right"), None, 3, ("b",), ("b", 4), ("b", None, 1), ("b", "right")], (False, 0.25, "R", 0)),
    "lines": ("Agent one: let's see.\nMove: right\nAgent two: agreed", (False, 0.25, "R", 0)),
    "cells": ([("a", "(1,1) → (1,2) → (2,2) → (2,3) → (3,3)"), ("b", "perfect")], (True, 1.0, "RDRD", 0)),
    "nothing": (None, (False, 0.0, "", 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", TALKS)
def test_known_dialogues(name):
    talk, want = TALKS[name]
    assert maze_text.grade(ROOM, talk) == want


def test_a_monologue_and_its_limit():
    alone = functools.partial(maze_text.grade, ROOM, agents=1)
    assert alone([("me", "The path: right, down, right, down.")]) == (True, 1.0, "RDRD", 0)
    assert alone([("me", "right, down"), ("me", "then right"), ("me", "down")]).success
    assert alone([("me", "right, left, " * 50)], most=6) == (False, 0.0, "RLRLRL", 0)
    assert alone([("me", "RDRDUU")]) == (True, 1.0, "RDRD", 0)  # it ends at the goal


SCRAPS = [
    *"UDLR→↓()[],:;.!?\n\0\ud800\u202e🡒٣²",
    "right",
    "Move:",
    "(1, 2)",
    "(99999999999999999999,1)",
    "no",
    "agreed",
]
SCRAPS += ["up to", "don't", "->", "agent two:", "ß", "ﬁ", "𝟙", "(2,", "left" * 50, "[1;2]"]


def garbage(rng):
    parts = [SCRAPS[i] for i in rng.integers(0, len(SCRAPS), rng.integers(0, 12))]
    text = (" " * rng.integers(0, 2)).join(parts) + "".join(map(chr, rng.integers(0, 0x110000, rng.integers(0, 6))))
    return text[: rng.integers(0, 60)]


def test_ten_thousand_replies_do_not_make_the_grader_raise():
    """Scraps of directions, cells and consent, any characters (surrogates too), cut anywhere."""
    rng, replies, made, clock = np.random.default_rng(0), 0, 0, time.process_time()
    while replies < 10_000:
        talk = [("ab"[i % 2], garbage(rng)) for i in range(20)]
        replies += len(talk)
        for transcript in (talk, "\n".join(f"{who}: {text}" for who, text in talk)):
            got = maze_text.grade(ROOM, transcript)
            assert got.success == (got.progress == 1.0) and 0 <= got.progress <= 1
            assert len(got.moves) + got.blocked <= 20 and set(got.moves) <= set("UDLR")
            made += len(got.moves)
        assert all(set(proposals(text, 4, 3)) <= set("UDLR") for _, text in talk)
    assert made > 200 and time.process_time() - clock < 20


@settings(max_examples=200, deadline=None, database=None)
@given(
    transcript=st.one_of(
        st.text(),
        st.binary(),
        st.lists(st.one_of(st.text(), st.none(), st.tuples(st.text(), st.text()), st.tuples(st.text(), st.binary()))),
        st.dictionaries(st.text(), st.text()),
    )
)
def test_no_transcript_makes_the_grader_raise(transcript):
    got = maze_text.grade(ROOM, transcript)
    assert 0 <= got.progress <= 1 and isinstance(got.moves, str)


@pytest.mark.parametrize(
    "text",
    [
        "right " * 40_000,
        "move:" * 40_000,
        "(" * 90_000,
        "R," * 60_000,
        ", " * 60_000,
        "*" * 90_000,
        "(1, " + "9" * 9999 + ")",
    ],
)
def test_a_long_reply_takes_no_long_time(text):
    clock = time.process_time()
    maze_text.grade(ROOM, [("a", text), ("b", text)])
    assert time.process_time() - clock < 2.0


# The environment

PHRASES = {"U": "Move: up", "D": "let's go down", "L": "← I think", "R": "R", "?": "hm, hard to say"}


@settings(max_examples=25, deadline=None, database=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 99),
    letters=st.lists(st.sampled_from(["UUU", "DDD", "LLL", "RRR", "UDL", "R?R", "LLR"]), min_size=3, max_size=3),
)
def test_text_pays_what_the_array_game_pays(name, seed, letters):
    config, (host, array) = CONFIGS[name], played(name)
    task = {k: v[0] for k, v in maze.make_tasks(config, seed, 1).items()}
    state, inner, done = host.reset(seed, task), array.reset(seed, task), False
    for said in letters:
        said, shown = said[: config.agents], host.observe(state)
        assert list(shown) == list(host.roles) == list(array.look(inner))
        state, paid, done = host.step(0, state, {r: Action(PHRASES[x], ()) for r, x in zip(host.roles, said)})
        inner, want, over = array.step(inner, [x.encode() for x in said])
        assert paid == want and done == over
        assert jax.tree.all(jax.tree.map(np.array_equal, state.inner, inner))
        if done:
            break
    assert done and host.observe(state) == {}


def test_what_an_agent_reads():
    host, _ = played("pair")
    state = host.reset(0, ROOM)
    (rules, asked), (_, other) = host.observe(state).values()
    assert rules.text.startswith("You are agent one. You walk through a maze with a partner")
    assert asked.text == (
        "Map:\n    1  2  3\n 1  @  ?  #\n 2  ?  .  ?\n 3  #  ?  G\nYou are at (1, 1), the goal is at (3, 3)."
    )
    assert other.text.split("\n")[2:5] == [" 1  @  .  ?", " 2  #  ?  .", " 3  ?  #  G"]
    say = lambda *texts: {role: Action(text, ()) for role, text in zip(host.roles, texts)}
    state, paid, done = host.step(0, state, say("I see no wall. Move: right", "Right" + "!" * 600))
    assert not done and paid["two"] == {"accuracy": 0.0, "progress": 0.25, "agreement": 0.0}
    lines = host.observe(state)["one"][1].text.split("\n")
    assert lines[-4:] == [
        "You are at (1, 2), the goal is at (3, 3).",
        "Last turn you all named the same direction and moved.",
        "You said: I see no wall. Move: right",
        f"Agent two said: Right{'!' * 495}",  # 500 characters
    ]
    state, _, _ = host.step(0, state, say("up", "up"))
    assert "Last turn you all walked into a wall" in host.observe(state)["two"][1].text
    lone, _ = played("solo")
    rules, asked = lone.observe(lone.reset(0, {**ROOM, "owner": np.zeros(9, int)}))["one"]
    assert rules.text.startswith("You walk through a maze, one step") and "You move only" not in rules.text
    assert "partner" not in rules.text and "?" not in asked.text


def test_partners_are_those_of_the_topology():
    host, _ = played("random")
    state = host.reset(5, {k: v[0] for k, v in maze.make_tasks(CONFIGS["random"], 5, 1).items()})
    state, _, done = host.step(0, state, {r: Action(f"hm {r}", ()) for r in host.roles})
    assert not done
    for seat, shown in enumerate(host.observe(state).values()):
        heard = [line for line in shown[1].text.split("\n") if line.startswith("Agent ")]
        who = maze.ROLES[int(state.inner.partners[1, seat, 0])]
        assert heard == [f"Agent {who} said: hm {who}"] and who != maze.ROLES[seat]


@pytest.mark.parametrize("name", CONFIGS)
def test_demonstrations_in_words_are_those_of_the_array_form(name):
    config = CONFIGS[name]
    rows = maze_text.demonstrations(config, maze_text.tasks(config))
    array = maze.demonstrations(config.board, config.seed, 8)
    said = np.concatenate([array[role]["completion"][:, 0] for role in array])
    assert [role for role, _, _ in rows] == [role for role in array for _ in range(8)]
    assert [proposals(reply, 0, 3) for _, _, reply in rows] == [[chr(x)] for x in said]
    assert all(prompt[0].text.endswith("'Move: right'.") and "@" in prompt[1].text for _, prompt, _ in rows)
    heard = [prompt[1].text.count("said: ") for _, prompt, _ in rows]
    assert set(heard) == {0, 1 + config.heard}


def test_splits_memory_and_bad_input():
    config = dataclasses.replace(CONFIGS["pair"], split="test", count=5)
    held = maze.make_tasks(config, None, 5, held_out=True)
    for i, task in enumerate(maze_text.tasks(config)):
        assert all(np.array_equal(task[k], held[k][i]) for k in held)
    prompt = maze_text.prompt(config, 0, played("pair")[0].reset(0, ROOM).inner, ())
    line = maze_text.strategy("one", prompt, Action("Move: up", ()), {"accuracy": 0.0, "progress": 0.25})
    assert line.startswith("one (0.2) on 'Map: 1 2 3 1 @ ? #") and line.endswith("Move: up")
    for args in ({"split": "dev"}, {"agents": 0}):
        with pytest.raises(ConfigError, match=rf"^config\.env\.args\.{next(iter(args))}: "):
            registry.EnvConfig("maze_text", args).build()
