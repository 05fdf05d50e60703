"""Programs with reflection: episodes against a slow twin, hints against a search, demonstrations, bad input."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import reflect_bounds
from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.programs import array as programs
from jaxmarl_llm.envs.programs import hints, reflect
from jaxmarl_llm.envs.programs.array import Config
from jaxmarl_llm.envs.programs.reflect import ROLES, Settings
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.envs.test_programs import EVERY, TASK, fits, row, run

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
CONFIG = Config(protocol="reflect")
RIGHT = Config(
    protocol="reflect",
    lookalike_rate=0,
    order_error_rate=0,
    padding_rate=0,
    reflect=Settings(hint_error_rate=0, neglect_rate=0),
)
ORDER = ["planner", "coder", *["reflector", "coder"] * 3]


def text_of(examples):
    return ",".join(f"{x}{y}" for x, y in np.asarray(examples).tolist())


@functools.cache
def compiled(reflections=3):
    env = programs.make(Config(protocol="reflect", reflect=Settings(reflections=reflections)))
    return env, jax.jit(env.step), jax.jit(env.observe)


def play(said, task=TASK, reflections=3):
    """Prompts, the rewards of each turn, and whether the episode is over, for completions (text, whether it ends)."""
    env, step, observe = compiled(reflections)
    state, prompts, paid, done = env.reset(KEY, task), [], [], False
    for words in said:
        seen = jax.device_get(observe(state))
        prompts.append((env.roles[seen.role[0]], BYTES.decode(seen.tokens[0, : seen.length[0]])))
        assert bool(seen.active[0]) == (not done) and seen.role[0] == env.actors[len(prompts) - 1][0]
        text, ends = words if isinstance(words, tuple) else (words, True)
        state, rewards, done = step(KEY, state, *row(text, ends))
        paid.append({c: np.asarray(r, float).tolist() for c, r in rewards.items()})
        if done:
            break
    return prompts, paid, bool(done), state


def test_an_episode_by_hand():
    """The episode of the docstring. It ends with the third program, which is right."""
    prompts, paid, done, state = play(["iad", "ad", "~", "da", "+3i", "dai", "~", "d"])
    assert prompts == [
        ("planner", "P01,37,99>"),
        ("coder", "C01,37,99|adi>"),
        ("reflector", "R01,37,99|adxxx>"),
        ("coder", "C01,37,99|adi|adxxx|~>"),
        ("reflector", "R01,37,99|da068>"),
        ("coder", "C01,37,99|adi|da068|+3i>"),
    ]
    assert done and [p["tests"] for p in paid] == [[0] * 3] * 5 + [[1] * 3]
    assert [p["score"][1] for p in paid] == [0, 0, 0, 0, 0, 1] and not any(
        p["invalid"][k] for p in paid for k in range(3)
    )
    assert [p["turns"] for p in paid[:3]] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    _, step, observe = compiled()
    after, rewards, over = step(KEY, state, *row("dai"))  # nothing happens behind the end
    assert over and not any(np.any(r) for r in rewards.values()) and not observe(state).active[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_a_first_program_that_is_right_ends_the_episode():
    prompts, paid, done, _ = play(["a", "dai"])
    assert done and len(prompts) == 2 and paid[-1]["first"] == paid[-1]["tests"] == [1, 1, 1]


# -- the episode against a twin ----------------------------------------------------------------------------------------


def changed(program, hint):
    """The program after a hint, None where it is not possible: written from the docstring of the hints."""
    letters = list(program)
    if hint == "~":
        return None if len(letters) < 2 else "".join(reversed(letters))
    found = re.fullmatch(r"([+=])([1-9])([abdghimn])|(-)([1-9])", hint)
    if not found:
        return None
    kind, place = found[1] or found[4], int(found[2] or found[5])
    if kind == "+":
        if len(letters) == 4 or place > len(letters) + 1:
            return None
        letters.insert(place - 1, found[3])
    elif place > len(letters) or (kind == "-" and len(letters) == 1):
        return None
    elif kind == "=":
        letters[place - 1] = found[3]
    else:
        del letters[place - 1]
    return "".join(letters)


def share(program, examples):
    return sum(run(program, x) == y for x, y in examples) / len(examples) if program else 0.0


def twin(said, task, reflections):
    """The episode in plain Python, programs by a slow interpreter."""
    shown, hidden = task["shown"].tolist(), task["hidden"].tolist()
    order = ORDER[: 2 + 2 * reflections]
    examples, sketch, program, hint = text_of(shown), None, None, None
    prompts, paid = [], []
    for turn, (role, (text, ends)) in enumerate(zip(order, said, strict=False)):
        body = [examples]
        if role == "coder":
            body.append(sketch)
        if turn > 1:
            got = [run(program, x) if program else None for x, _ in shown]
            signs = ["+" if g == y else "x" if g is None else str(g) for g, (_, y) in zip(got, shown, strict=True)]
            body.append((program or "?") + "".join(signs))
            body += [hint] if role == "coder" else []
        prompts.append((role, role[0].upper() + "|".join(body) + ">"))
        word = ends and re.fullmatch("[abdghimn]{1,4}", text)
        pay = {name: [0.0] * 3 for name in ("tests", "first", "score", "invalid", "turns")}
        own, done = ROLES.index(role), False
        if role == "planner":
            proper, sketch = bool(word), "".join(sorted(text)) if word else "?"
        elif role == "reflector":
            proper = bool(ends and changed(program, text) is not None)
            hint = text if proper else "?"
        else:
            proper, program = bool(word), text if word else ""
            score = share(program, hidden)
            done = share(program, shown) == 1 or turn == len(order) - 1
            pay["score"][own] = score
            pay["first"] = [score * (turn == 1)] * 3
            pay["tests"] = [score * done] * 3
        pay["invalid"][own], pay["turns"][own] = -1.0 * (not proper), 1.0
        paid.append(pay)
        if done:
            return prompts, paid, True
    return prompts, paid, False


def drawn_words(rng, task):
    """Completions that are often in form: words of operations, hints, and what is neither. Some are cut off."""
    answer = next(p for p in EVERY if fits(p, text_of(task["shown"])))
    said = []
    for role in ORDER:
        word = "".join(rng.choice([*"abdghimn"], rng.integers(1, 5)))
        hint = f"{rng.choice([*'+=-~'])}{rng.integers(6)}{rng.choice([*'aimnx'])}"
        hint = {"-": hint[:2], "~": "~"}.get(hint[0], hint)
        options = [
            answer if role == "coder" else word,
            word,
            hint if role == "reflector" else word,
            hint,
            "",
            "dx",
            "aaaaa",
        ]
        weights = [0.25, 0.15, 0.4, 0.05, 0.05, 0.05, 0.05]
        said.append((str(rng.choice(options, p=weights)), bool(rng.random() < 0.95)))
    return said


@pytest.mark.parametrize("reflections", [1, 3])
def test_random_episodes_are_those_of_a_slow_twin(reflections):
    """Prompts, rewards and ends. Episodes have all numbers of rounds, and hints of all kinds are possible and not."""
    rng, rounds, forms = np.random.default_rng(reflections), collections.Counter(), collections.Counter()
    tasks = programs.make_tasks(CONFIG, 0, 40)
    for i in range(40):
        task = {name: column[i] for name, column in tasks.items()}
        said = drawn_words(rng, task)
        got, want = play(said[: 2 + 2 * reflections], task, reflections), twin(said, task, reflections)
        assert got[0] == want[0] and got[2] and want[2]
        for mine, other in zip(got[1], want[1], strict=True):
            assert set(mine) == set(other)
            for name, values in other.items():
                np.testing.assert_allclose(mine[name], values, atol=1e-6, err_msg=name)
        rounds[len(got[0]) // 2 - 1] += 1
        forms.update(p["invalid"][2] for p in got[1] if p["turns"][2])
    assert set(rounds) == {*range(reflections + 1)} and set(forms) == {0.0, -1.0}


# -- hints -------------------------------------------------------------------------------------------------------------


def test_hints_change_programs_as_a_twin_does():
    for program in ["", *EVERY[:80], *EVERY[584:4680:37]]:
        for hint in hints.HINTS:
            want = changed(program, hint)
            assert hints.followed(program, hint) == want, (program, hint)


def test_a_hint_is_read_where_it_is_possible():
    """Every sequence of at most four signs out of a few, on programs of all lengths."""
    signs = "+=-~0145ix"
    texts = ["".join(t) for size in range(5) for t in itertools.product(signs, repeat=size) if size < 4 or t[0] in "+~"]
    rows = [row(text) for text in texts]
    tokens, lengths = (np.concatenate([r[k] for r in rows]) for k in (0, 1))
    for program in ("", "a", "ab", "abd", "abdg"):
        read = jax.vmap(hints.read_hint, in_axes=(0, 0, None))(tokens, lengths, jnp.int32(len(program)))
        want = [changed(program, text) is not None for text in texts]
        np.testing.assert_array_equal(read.proper, want)
        assert any(want)
        cut_off = jax.vmap(hints.read_hint, in_axes=(0, 0, None))(tokens, lengths - 1, jnp.int32(len(program)))
        assert not cut_off.proper.any()


def near(program):
    return {after for hint in hints.HINTS if (after := changed(program, hint)) is not None}


def test_the_best_hint_begins_a_shortest_way():
    """Against a search in breadth from the program, whose edges are those of the twin."""
    rng = np.random.default_rng(3)
    for shown in ("01,37,99", "12,36,55", "10,21,94"):
        right = [p for p in EVERY if fits(p, shown)]
        targets = {p for p in right if len(p) == len(right[0])}
        assert set(hints.shortest_fits(shown)) == targets and [*hints.shortest_fits(shown)] == sorted(targets)
        for program in ["", *rng.choice(EVERY[:584], 4)]:
            level, seen, distance = {str(program)}, {str(program)}, 0
            while not level & targets:
                level = set().union(*map(near, level)) - seen
                seen |= level
                distance += 1
            assert hints.hints_needed(shown, program) == distance
            if distance:
                after = changed(program, hints.best_hint(shown, program))
                assert hints.hints_needed(shown, after) == distance - 1
    with pytest.raises(ValueError, match="no hint for 'dai'"):
        hints.best_hint("01,37,99", "dai")


# -- demonstrations, bounds, bad input ---------------------------------------------------------------------------------


def said(samples):
    for ids, length, reply, size in zip(*samples.values(), strict=True):
        assert reply[size - 1] == BYTES.EOS
        yield BYTES.decode(ids[:length]), BYTES.decode(reply[: size - 1])


def test_demonstrations_fit_and_have_the_planted_mistakes():
    """Every one is in form, and of a training task; with eos it fits five tokens, and its prompt fits 64."""
    shown = programs.demonstrations(CONFIG, 0, 400)
    count, turns = collections.Counter(), collections.Counter()
    assert set(shown) == set(ROLES)
    for role, samples in shown.items():
        assert samples["completion"].shape == (400, 5) and samples["tokens"].shape == (
            400,
            programs.prompt_length(CONFIG),
        )
        for prompt, reply in said(samples):
            examples, *entries = prompt[1:-1].split("|")
            assert prompt[0] == role[0].upper() and not splits.is_held_out(examples)
            turns[role, len(entries)] += 1
            if role == "planner":
                assert reply == "".join(sorted(reply))
                count["right sketch"] += any(fits("".join(p), examples) for p in itertools.permutations(reply))
            elif role == "reflector":
                before = entries[0][:-3]
                assert changed(before, reply) is not None and not fits(before, examples)
                nearer = hints.hints_needed(examples, changed(before, reply)) < hints.hints_needed(examples, before)
                count["right hint"] += nearer
            elif len(entries) == 1:
                orders = sorted({"".join(p) for p in itertools.permutations(entries[0])})
                pairs = [(int(x), int(y)) for x, y in examples.split(",")]
                best = max(orders, key=lambda program: share(program, pairs))  # the first of equal ones
                body = reply.removesuffix("nn") if len(reply) > len(entries[0]) else reply
                assert body in (best, best[::-1])
                count["padded"] += body != reply
                if best != best[::-1]:
                    count["good order"] += body == best
                    count["two orders"] += 1
            else:
                before, hint = entries[1][:-3], entries[2]
                assert reply in (before, changed(before, hint))
                count["followed"] += reply == changed(before, hint)
                count["again"] += 1
    assert set(turns) == {("planner", 0), ("coder", 1), ("coder", 3), ("reflector", 1)}
    assert 0.45 < count["right sketch"] / 400 < 0.75  # half, and look-alikes that fit the three examples too
    assert 0.65 < count["right hint"] / 400 < 0.85  # 0.7, and look-alikes that help too
    assert 0.5 < count["good order"] / count["two orders"] < 0.8  # half of all; a right program has no turn behind it
    assert count["padded"] > 10
    assert 0.6 < count["followed"] / count["again"] < 0.8
    assert programs.prompt_length(CONFIG) <= 64 and programs.make(CONFIG).max_turns == 8


def test_without_mistakes_the_first_program_is_right():
    for role, samples in programs.demonstrations(Config(protocol="plan"), 0, 3).items():
        assert role in ROLES and len(samples["tokens"]) == 3
    rng = np.random.default_rng(0)
    for task in programs.make_tasks(CONFIG, 5, 60)["shown"]:
        turns = reflect.episode(rng, RIGHT, text_of(task), reflect.DEMONSTRATORS)
        assert len(turns) == 2 and fits(turns[1][2], text_of(task))


def test_a_perfect_reflector_and_coder_mend_any_program():
    """Three hints, and a coder that follows them, repair a random first program in most tasks."""
    rng, mended = np.random.default_rng(1), 0
    wrong = reflect.PERFECT._replace(program=lambda rng, config, shown, sketch: EVERY[rng.integers(584)])
    for task in programs.make_tasks(CONFIG, 6, 60)["shown"]:
        shown = text_of(task)
        turns = reflect.episode(rng, RIGHT, shown, wrong)
        needed = hints.hints_needed(shown, turns[1][2]) if not fits(turns[1][2], shown) else 0
        assert len(turns) <= 2 + 2 * min(3, needed)
        mended += fits(turns[-1][2], shown) and needed > 0
        assert needed > 3 or fits(turns[-1][2], shown)
    assert mended > 30


def test_bounds_are_between_demonstrators_and_a_perfect_team():
    """One perfect role lies between. A perfect team writes one program, the first of the shortest that fit."""
    got = {name: reflect_bounds.reached(CONFIG, team, episodes=150) for name, team in reflect_bounds.TEAMS.items()}
    least, most = got["demonstrators"].last, got["perfect"].last
    assert most == got["perfect"].first and got["perfect"].programs == 1
    assert all(least < got[f"perfect {role}"].last < most for role in ROLES)
    assert all(team.first <= team.last for team in got.values())


def test_both_sides_of_the_split_are_those_of_other_protocols():
    for held_out in (False, True):
        one, other = (programs.make_tasks(Config(protocol=p), 2, 50, held_out=held_out) for p in ("reflect", "plan"))
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"protocol": "reflexion"}, r"args\.protocol: unknown value 'reflexion'"),
        ({"protocol": "reflect", "reflect": {"reflections": 0}}, r"args\.reflect\.reflections: expected 1 to 3, got 0"),
        ({"protocol": "reflect", "reflect": {"reflections": 4}}, r"args\.reflect\.reflections: expected 1 to 3, got 4"),
        ({"protocol": "reflect", "reflect": {"neglect_rate": 2}}, r"reflect\.neglect_rate: expected a probability in"),
        ({"protocol": "reflect", "reflect": {"hint_error_rate": -1}}, r"reflect\.hint_error_rate: expected a probab"),
        ({"protocol": "reflect", "reflect": {"reflection": 2}}, r"args\.reflect.*reflection"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("programs", bad).check("config.env")
    assert "\n" not in str(error.value)
