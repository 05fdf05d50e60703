"""Segments: golden numbers, rules and episodes against slow twins, perfect and degenerate teams, demonstrations."""

import collections
import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.segments import array as segments
from jaxmarl_llm.envs.segments import rules
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CONFIG = segments.Config()
WIDTH = 28  # R of the tests: two tokens more than are read
BATCH = 300  # episodes that are played at once: one compiled program


# -- slow twins, written from the docstrings ---------------------------------------------------------------------------


def split(text, most):
    """Sentences, each with its separator."""
    parts = [part for part in re.findall(r"[^;]*;|[^;]+$", text)]
    return parts[: most - 1] + (["".join(parts[most - 1 :])] if len(parts) >= most else [])


def join(parts, marked):
    """Segments of sentences."""
    out, open_ = [], False
    for k, part in enumerate(parts):
        out = [*out[:-1], out[-1] + part] if open_ else [*out, part]
        open_ = not marked[k]
    return out


def steps_of(question, modulus=10):
    numbers, signs = [int(x) for x in question[::2]], question[1::2]
    value, out = numbers[0], []
    for sign, number in zip(signs, numbers[1:], strict=True):
        value = (value + number if sign == "+" else value - number) % modulus
        out.append(f"{sign}{number}={value}")
    return out


class Twin:
    """An episode in plain Python."""

    def __init__(self, config, question):
        self.config, self.question, self.turn = config, question, 0
        self.parts, self.written, self.segments, self.weights = [], 0, [], []

    def prompt(self):
        mark, parts = "RSW"[self.turn], (None, self.parts, self.segments)[self.turn]
        shown = "" if self.turn == 0 else "|" + "".join(a + p.removesuffix(";") for a, p in zip("ABCDEFGHIJ", parts))
        return f"{mark}{self.question}{shown}>"

    def act(self, text, ended):
        """Whether a completion is well-formed."""
        role, self.turn = self.turn, self.turn + 1
        if role == 0:
            self.written, most = len(text), self.config.longest
            shown = re.sub(r"[^0-9+\-=;ghijkxyz]", "?", text)
            self.parts = split(shown[:most], self.config.sentences)
            self.segments = join(self.parts, [False] * 99)
            self.weights = [5] * len(self.segments)
            return ended and shown == text and len(text) <= most
        if role == 1:
            labels = "ABCDEFGHIJ"[: len(self.parts)]
            self.segments = join(self.parts, [label in text for label in labels])
            self.weights = [5] * len(self.segments)
            return ended and set(text) <= set(labels) and [*text] == sorted(set(text))
        pairs = [(text + "?" * 20)[2 * k : 2 * k + 2] for k in range(len(self.segments))]
        for k, pair in enumerate(pairs):
            if re.fullmatch("ABCDEFGHIJ"[k] + "[1-5]", pair):
                self.weights[k] = int(pair[1])
        good = all(re.fullmatch("ABCDEFGHIJ"[k] + "[1-5]", pair) for k, pair in enumerate(pairs))
        return ended and good and len(text) == 2 * len(pairs)

    def facts(self):
        text, needed = "".join(self.parts), steps_of(self.question, self.config.modulus)
        owner = [k for k, part in enumerate(self.segments) for _ in split(part, 99)]
        if len(owner) > len(self.parts):  # the last sentence has separators of its own
            owner = owner[: len(self.parts)]
        weight = [self.weights[k] for k in owner]
        kept = [part.removesuffix(";") for part, w in zip(self.parts, weight, strict=True) if w > 2]
        steps, total = [("=" in part) for part in self.parts], max(1, len(text))
        last = text.rfind("=")
        return {
            "accuracy": float(last >= 0 and text[last + 1 : last + 2] == needed[-1][-1]),
            "penalty": sum(len(p) * (1 - w / 5) for p, w in zip(self.segments, self.weights)) / total,
            "follows": float([part for part in kept if "=" in part] == needed),
            "left_out": sum(len(p) for p, w in zip(self.segments, self.weights) if w <= 2) / total,
            "length": self.written,
            "segments": len(self.segments),
            "steps": sum(steps),
            "fillers": len(steps) - sum(steps),
            "step_weight": sum(w for w, step in zip(weight, steps) if step),
            "filler_weight": sum(w for w, step in zip(weight, steps) if not step),
            "fillers_kept": sum(w > 2 for w, step in zip(weight, steps) if not step),
        }


# -- playing -----------------------------------------------------------------------------------------------------------


def encode(texts, ended):
    """Completions [n R] and their lengths, cut at R tokens."""
    rows = [([*text.encode()] + [BYTES.EOS] * end)[:WIDTH] for text, end in zip(texts, ended, strict=True)]
    return np.array([row + [BYTES.PAD] * (WIDTH - len(row)) for row in rows], np.int32), np.array([*map(len, rows)])


def player(config):
    """The turns of many episodes at once, compiled."""
    env = segments.make(config)

    def turn(state, words, length):
        return env.observe(state), env.step(jax.random.key(0), state, words[None], length[None])

    return env, jax.jit(jax.vmap(turn))


PLAYERS = {name: player(config) for name, config in (("default", CONFIG), ("alone", segments.Config(alone=True)))}


def play(scripts, questions, name="default"):
    """Rewards and prompts of episodes. ``scripts``: texts of the roles of each episode. All completions have an eos."""
    (env, both), count = PLAYERS[name], len(scripts)
    scripts, questions = (list(x) + [x[-1]] * (BATCH - len(x)) for x in (scripts, questions))
    task = {
        "question": np.array([[*q.encode()] for q in questions], np.int32),
        "answer": np.array([int(steps_of(q)[-1][-1]) for q in questions], np.int32),
    }
    state = jax.vmap(partial(env.reset, jax.random.key(0)))(task)
    prompts, paid = [[] for _ in range(count)], [collections.Counter() for _ in range(count)]
    for turn in range(env.max_turns):
        words, length = encode([script[turn] for script in scripts], [True] * BATCH)
        shown, (state, rewards, done) = jax.device_get(both(state, words, length))
        for i in range(count):
            prompts[i].append(BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]))
            for k, v in rewards.items():
                if k == "malformed":
                    paid[i].update({f"malformed/{role}": float(x) for role, x in zip(segments.ROLES, v[i])})
                else:
                    assert len(set(v[i].tolist())) == 1
                    paid[i][k] += float(v[i, 0])
        assert done.all() == (turn == env.max_turns - 1)
    return paid, prompts


# -- golden numbers ----------------------------------------------------------------------------------------------------


def test_golden_penalty():
    """Segments of 4, 2 and 4 tokens with weights 5, 1 and 3: .32. With alpha .5 a right text earns .84."""
    length, weight = jnp.array([4, 2, 4, 0]), jnp.array([5, 1, 3, 1])
    penalty = float(rules.importance_penalty(length, weight))
    assert penalty == pytest.approx(0.32) and 1 - 0.5 * penalty == pytest.approx(0.84)
    assert float(rules.left_out(length, weight)) == pytest.approx(0.2)
    assert float(rules.importance_penalty(length * 0, weight)) == 0.0


def test_golden_episode():
    """The same segments as texts, from the docstring: a reasoner, a segmenter and a scorer of one episode."""
    (paid,), (prompts,) = play([("gh+4;x;-2=5", "AB", "A5B1C3")], ["3+4-2"])
    assert prompts == ["R3+4-2>", "S3+4-2|Agh+4BxC-2=5>", "W3+4-2|Agh+4BxC-2=5>"]
    assert paid["penalty"] == pytest.approx((0 * 5 + 0.8 * 2 + 0.4 * 4) / 11)
    assert paid["accuracy"] == 1 and paid["follows"] == 0  # the answer is right, but a needed step is missing


# -- twins -------------------------------------------------------------------------------------------------------------


def random_texts(rng, twins):
    """Completions of the role that acts: mostly readable ones, with faults of every kind, and some without eos."""
    texts = []
    for twin in twins:
        pick = lambda options: options[rng.integers(len(options))]
        if twin.turn == 0:
            needed = steps_of(twin.question)
            pool = [*needed, *needed, "xy", "ghij", "+1=2", needed[0] + "g", "", "=", "a"]
            parts = [pick(pool) for _ in range(rng.integers(0, 4))]
            if rng.random() < 0.5:
                parts = [x for step in needed for x in (*([pick(["g", "xyz", step])] * (rng.random() < 0.5)), step)]
            texts.append(";".join(parts) + pick(["", "", ";", ";k", ";;;gh;+1=2;x"]))
        elif twin.turn == 1:
            labels = "".join(label for label, _ in zip("ABCDEFGHIJ", twin.parts) if rng.random() < 0.7)
            texts.append(pick([labels, labels, labels, labels[::-1], labels + "J", "x" + labels, labels * 2]))
        else:
            pairs = "".join(f"{label}{rng.integers(1, 6)}" for label, _ in zip("ABCDEFGHIJ", twin.segments))
            texts.append(
                pick([pairs, pairs, pairs, pairs[:-1], pairs + "A1", pairs[2:], "A0" + pairs[2:], "5" + pairs])
            )
    return texts, [bool(rng.random() < 0.95) for _ in twins]


@pytest.mark.parametrize("seed", range(3))
def test_random_episodes_are_those_of_a_slow_twin(seed):
    n, rng = BATCH, np.random.default_rng(seed)
    env, both = PLAYERS["default"]
    tasks = segments.make_tasks(CONFIG, seed=seed, n=n)
    twins = [Twin(CONFIG, bytes(q.tolist()).decode()) for q in tasks["question"]]
    assert [int(steps_of(twin.question)[-1][-1]) for twin in twins] == tasks["answer"].tolist()
    state, seen = jax.vmap(partial(env.reset, jax.random.key(0)))(tasks), collections.Counter()
    for turn in range(3):
        texts, ended = random_texts(rng, twins)
        words, length = encode(texts, ended)
        ended = [end and len(text) < WIDTH for text, end in zip(texts, ended)]
        shown, (state, paid, done) = jax.device_get(both(state, words, length))
        assert bool(shown.active.all()) and (done == (turn == 2)).all()
        for i, twin in enumerate(twins):
            assert BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]) == twin.prompt()
            proper = twin.act(texts[i][:WIDTH], ended[i])
            assert paid["malformed"][i].tolist() == [float(k == turn and not proper) for k in range(3)]
            want = twin.facts() if turn == 2 else dict.fromkeys(segments.COMPONENTS[:-1], 0.0)
            for name, value in want.items():
                assert np.abs(paid[name][i] - value).max() < 1e-5, f"{name} of {twin.parts}"
            seen.update(f"{turn} malformed" for _ in range(not proper))
            seen.update(k for k, v in want.items() if v)
    assert all(seen[name] > 15 for name in (*segments.COMPONENTS[:-1], *(f"{t} malformed" for t in range(3)))), seen


CHARACTERS = st.text(alphabet="+-=;0123456789gx", max_size=CONFIG.longest)
RULED = jax.jit(
    lambda text, size, marked: (
        (found := rules.sentences(text, size, 5)),
        rules.segments(*found, marked),
        rules.lengths(rules.segments(*found, marked)[0], size, 5),
    )
)


@settings(max_examples=60, deadline=None)
@given(CHARACTERS, st.lists(st.booleans(), min_size=5, max_size=5))
def test_segments_part_a_text(text, marked):
    """Every token is in one segment, segments are numbered in order, and none is empty."""
    row = np.array([*text.encode(), *[BYTES.PAD] * (CONFIG.longest - len(text))], np.int32)
    (_, number), (part, parts), length = RULED(row, len(text), np.array(marked))
    want = join(split(text, 5), marked)
    assert int(number) == len(split(text, 5)) and int(parts) == len(want)
    assert [*map(int, length)] == [*map(len, want), *[0] * (5 - len(want))]
    assert [*map(int, part[: len(text)])] == [k for k, one in enumerate(want) for _ in one]


# -- perfect and degenerate teams --------------------------------------------------------------------------------------


QUESTION, STEPS = "3+4-2", "+4=7;-2=5"
TEAMS = {  # texts of the roles -> rewards
    "perfect": ((STEPS, "A", "A5B5"), {"accuracy": 1, "penalty": 0, "follows": 1, "left_out": 0, "length": 9}),
    "filler is left out": (
        ("gh;+4=7;xyz;-2=5", "ABC", "A1B5C1D5"),
        {"accuracy": 1, "penalty": 0.8 * 7 / 16, "follows": 1, "left_out": 7 / 16, "fillers_kept": 0},
    ),
    "silent reasoner": (
        ("", "", ""),
        {"accuracy": 0, "penalty": 0, "follows": 0, "left_out": 0, "length": 0, "segments": 0},
    ),
    "all filler": (
        ("gh;xyz;", "AB", "A1B1"),
        {"accuracy": 0, "penalty": 0.8, "follows": 0, "left_out": 1, "fillers": 2, "steps": 0},
    ),
    "no boundary": (
        ("gh;+4=7;xyz;-2=5", "", "A5"),
        {"follows": 1, "left_out": 0, "penalty": 0, "segments": 1, "fillers_kept": 2},
    ),
    "always 5": (("gh;" + STEPS, "AB", "A5B5C5"), {"penalty": 0, "follows": 1, "left_out": 0, "fillers_kept": 1}),
    "always 1": (("gh;" + STEPS, "AB", "A1B1C1"), {"penalty": 0.8, "follows": 0, "left_out": 1, "fillers_kept": 0}),
    "a needed step is left out": (("gh;" + STEPS, "AB", "A5B2C5"), {"accuracy": 1, "follows": 0, "left_out": 5 / 12}),
    "a wrong step is left out": (
        ("+4=7;+9=6;-2=5", "AB", "A3B2C3"),
        {"accuracy": 1, "follows": 1, "left_out": 5 / 14, "penalty": 0.4 + 0.2 * 5 / 14},
    ),
    "a wrong step is kept": (("+4=7;+9=6;-2=5", "AB", "A3B3C3"), {"accuracy": 1, "follows": 0}),
    "a step twice": (("+4=7;+4=7;-2=5", "AB", "A5B5C5"), {"accuracy": 1, "follows": 0}),
    "steps out of order": (("-2=5;+4=7", "A", "A5B5"), {"accuracy": 0, "follows": 0}),
    "a step is skipped": (("-2=5", "", "A5"), {"accuracy": 1, "follows": 0, "steps": 1}),
    "no answer": (("+4=7;-2=", "A", "A5B5"), {"accuracy": 0, "follows": 0, "steps": 2}),
}


@pytest.fixture(scope="module")
def of_teams():
    return dict(zip(TEAMS, play([texts for texts, _ in TEAMS.values()], [QUESTION] * len(TEAMS))[0], strict=True))


@pytest.mark.parametrize("name", TEAMS)
def test_teams(name, of_teams):
    got = of_teams[name]
    assert {k: got[k] for k in TEAMS[name][1]} == pytest.approx(TEAMS[name][1], abs=1e-6)
    assert not any(got[f"malformed/{role}"] for role in segments.ROLES)


def test_malformed_completions_are_paid_and_read_as_far_as_they_go():
    scripts = [
        ("+4=7;-2=5;ab", "A", "A5B5"),  # characters that are shown as ?
        (STEPS, "BA", "A5B5"),  # not in order, but both are named
        (STEPS, "A", "A5"),  # a pair is missing: its weight is 5
        (STEPS, "A", "A1B9"),  # no weight of 1 to 5
        ("", "A", "A1"),  # labels of an empty text
        (STEPS, "A", "B1A2"),  # pairs in another order are not read
    ]
    paid, prompts = play(scripts, [QUESTION] * len(scripts))
    bad = [[role for role in segments.ROLES if got[f"malformed/{role}"]] for got in paid]
    assert bad == [["reasoner"], ["segmenter"], ["scorer"], ["scorer"], ["segmenter", "scorer"], ["scorer"]]
    assert prompts[0][1:] == ["S3+4-2|A+4=7B-2=5C??>", "W3+4-2|A+4=7B-2=5;??>"]
    assert paid[1]["segments"] == 2 and paid[2]["step_weight"] == 10 and paid[3]["step_weight"] == 6
    assert paid[5]["step_weight"] == 10
    assert prompts[4][1:] == ["S3+4-2|>", "W3+4-2|>"]


def test_the_reasoner_alone_has_the_rewards_that_need_no_weights():
    texts = ["gh;+4=7;xyz;-2=5", "-2=5;+4=7", "", "aa"]
    paid, prompts = play([(text,) for text in texts], [QUESTION] * 4, "alone")
    of_team, _ = play([(text, "", "") for text in texts], [QUESTION] * 4)
    for got, team in zip(paid, of_team, strict=True):
        for name in ("accuracy", "length", "steps", "fillers", "malformed/reasoner"):
            assert got[name] == team[name]
        assert not any(got[k] for k in ("penalty", "follows", "left_out", "segments", "step_weight", "filler_weight"))
    assert prompts == [["R3+4-2>"]] * 4 and [got["accuracy"] for got in paid] == [1, 0, 0, 0]
    assert segments.make(segments.Config(alone=True)).roles == segments.make(CONFIG).roles


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def test_questions_are_those_of_chain():
    for held_out in (False, True):
        tasks = segments.make_tasks(CONFIG, n=500, held_out=held_out)
        questions = [bytes(q.tolist()).decode() for q in tasks["question"]]
        assert all(re.fullmatch(r"\d[+-]\d[+-]\d", q) for q in questions)
        contents = [f"{[int(x) for x in q[::2]]}{q[1::2]}" for q in questions]
        assert all(splits.is_held_out(content) == held_out for content in contents)


def demonstrated(n=4000, **changes):
    """(question, sentences, ends, segments, weights) of demonstrated episodes, read from prompts and completions."""
    config = dataclasses.replace(CONFIG, **changes)
    taught, rows = segments.demonstrations(config, 0, n), []
    for role in segments.ROLES:
        d = taught[role]
        assert (d["completion"][np.arange(n), d["completion_length"] - 1] == BYTES.EOS).all()
        said = [BYTES.decode(ids[: size - 1]) for ids, size in zip(d["completion"], d["completion_length"])]
        rows.append(([BYTES.decode(ids[:size]) for ids, size in zip(d["tokens"], d["length"])], said))
    for (asked, text), (read, ends), (heard, weights) in zip(*(zip(*row) for row in rows), strict=True):
        question, parts = asked[1:-1], split(text, 99)
        twin = Twin(config, question)
        twin.act(text, True)
        assert twin.prompt() == read and twin.act(ends, True) and twin.prompt() == heard and twin.act(weights, True)
        yield twin, parts, ends


def test_demonstrators_err_as_often_as_the_settings_say():
    kinds = collections.defaultdict(list)
    for twin, parts, ends in demonstrated():
        needed, plain = steps_of(twin.question), [part.removesuffix(";") for part in parts]
        steps, facts = [part for part in plain if "=" in part], twin.facts()
        kinds["filler"].append((len(plain) - len(steps)) / 3)
        kinds["skipped"].append(len(steps) == 1)
        if len(steps) == 2 and needed[0][1] != "0":
            kinds["first wrong"].append(steps[0] != needed[0])
        kinds["merged"] += [label not in ends for label, _ in zip("ABCDEF", parts[:-1])]
        for part, weight in zip(twin.segments, twin.weights, strict=True):
            kinds["weight of steps" if "=" in part else "weight of filler"].append(weight)
        kinds["accuracy"].append(facts["accuracy"])
    mean = {k: np.mean(v) for k, v in kinds.items()}
    assert abs(mean["filler"] - CONFIG.filler_rate) < 0.02 and abs(mean["skipped"] - CONFIG.skip_rate) < 0.02
    assert abs(mean["merged"] - CONFIG.merge_rate) < 0.02
    assert abs(mean["first wrong"] - CONFIG.step_error_rate * 8 / 9) < 0.02  # 5 either way is the same
    assert set(kinds["weight of steps"]) == {2, 3, 4, 5} and set(kinds["weight of filler"]) == {1, 2, 3, 4}
    assert abs(mean["accuracy"] - 0.92**2) < 0.02  # a number other than 0 and 5 takes the other sign


def test_demonstrations_fit():
    """The longest prompt has 34 tokens, the longest completion 26. Without errors every text is right."""
    assert segments.prompt_lengths(CONFIG) == (7, 34, 34) and CONFIG.max_new_tokens == 26
    assert segments.entry_length(CONFIG) == 60
    clean = dict(step_error_rate=0.0, skip_rate=0.0, filler_rate=1.0, merge_rate=0.0)
    longest = 0
    for twin, parts, _ in demonstrated(300, **clean, filler=8, terms=2, step_weights=(5,), filler_weights=(1,)):
        facts = twin.facts()
        assert facts["accuracy"] == facts["follows"] == 1 and facts["fillers_kept"] == 0 and len(parts) == 3
        longest = max(longest, len("".join(parts)))
    assert longest == segments.Config(filler=8, terms=2).longest - 1  # no separator at the end


BAD = [
    ({"terms": 1}, r"config\.env\.args\.terms: expected 2 to 5, got 1"),
    ({"largest": 10}, r"config\.env\.args\.largest: expected 1 to 9, got 10"),
    ({"modulus": 1}, r"config\.env\.args\.modulus: expected 2 to 10, got 1"),
    ({"filler": 0}, r"config\.env\.args\.filler: expected 1 to 8, got 0"),
    ({"filler_rate": 1.5}, r"config\.env\.args\.filler_rate: expected a probability in \[0, 1\], got 1\.5"),
    ({"skip_rate": -0.1}, r"config\.env\.args\.skip_rate: expected a probability"),
    ({"step_weights": ()}, r"config\.env\.args\.step_weights: expected one or several weights of 1 to 5, got \(\)"),
    ({"filler_weights": (0, 2)}, r"config\.env\.args\.filler_weights: expected one or several weights of 1 to 5"),
    ({"rounds": 2}, r"config\.env\.args.*rounds"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("segments", bad).check("config.env")
    assert "\n" not in str(error.value)
