"""Programs: the language against a twin, the array game against a twin, tasks, demonstrations, bad input."""

import collections
import functools
import itertools
import re

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.programs import array as programs
from jaxmarl_llm.envs.programs import attempts, language
from jaxmarl_llm.envs.programs.roles import MARKS
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
CONFIGS = {name: programs.Config(protocol=name) for name in attempts.ROLES}
WIDTH = 6


def run(program, x):
    """The result of a program, or None: written from the docstring of the language."""
    stack = [x]
    for operation in program:
        if operation in "abmg" and len(stack) < 2:
            return None
        top = stack.pop()
        if operation == "d":
            stack += [top, top]
        elif operation == "n":
            stack.append((10 - top) % 10)
        elif operation == "i":
            stack.append((top + 1) % 10)
        elif operation == "h":
            stack.append((top - top % 2) // 2)
        else:
            under = stack.pop()
            both = {"a": under + top, "b": under + 10 - top, "m": under * top, "g": sorted([under, top])[1]}
            stack.append(both[operation] % 10)
    return stack[-1]


EVERY = ["".join(p) for size in (1, 2, 3, 4) for p in itertools.product("abdghimn", repeat=size)]


def test_the_results_of_all_programs():
    table = language.results()
    rows = [language.code_of(p) for p in EVERY]
    assert len(EVERY) == 4680 == len(set(rows))
    want = [[-1 if (y := run(p, x)) is None else y for x in range(10)] for p in EVERY]
    np.testing.assert_array_equal(table[rows], want)
    others = np.setdiff1d(np.arange(9**4), rows)
    assert len(others) and (table[others] == -1).all()


def test_golden_programs():
    """x + x + 1 is dai; max(x, -x) is dng; x - x // 2 is dhb; an addition without a second integer fails."""
    at = lambda program: language.results()[language.code_of(program)].tolist()
    assert at("dai") == [1, 3, 5, 7, 9, 1, 3, 5, 7, 9]
    assert at("dng") == [0, 9, 8, 7, 6, 5, 6, 7, 8, 9]
    assert at("dhb") == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert at("a") == at("dab") == [-1] * 10


def test_shortest_programs_are_one_for_each_function():
    shortest, first = language.shortest_programs(), {}
    for program in EVERY:  # by length, then by the alphabet
        if run(program, 0) is not None:
            first.setdefault(tuple(run(program, x) for x in range(10)), program)
    by_length = [[p for p in first.values() if len(p) == size] for size in (1, 2, 3, 4)]
    assert [list(p) for p in shortest.programs] == by_length
    for size, shorter in enumerate(shortest.shorter):
        want = {f for f, p in first.items() if len(p) <= size}
        assert {tuple(f) for f in shorter.tolist()} == want and len(shorter) == len(want)


# The game


@functools.cache
def compiled(name):
    env = programs.make(CONFIGS[name])
    return env, jax.jit(env.step), jax.jit(env.observe)


TASK = {  # x + x + 1: dai, no shorter program fits
    "shown": np.array([[0, 1], [3, 7], [9, 9]], np.int32),
    "hidden": np.array([[1, 3], [5, 1], [6, 3]], np.int32),
    "shortest": np.int32(3),
}


def row(text, ends=True):
    ids = ([*text.encode()] + [BYTES.EOS] * ends)[:WIDTH]
    return np.array([ids + [BYTES.PAD] * (WIDTH - len(ids))], np.int32), np.array([len(ids)], np.int32)


def play(name, *said):
    """Prompts, the rewards of each turn, whether the episode is over, and the state."""
    env, step, observe = compiled(name)
    state, prompts, paid, done = env.reset(KEY, TASK), [], [], False
    for words in said:
        seen = jax.device_get(observe(state))
        prompts.append((env.roles[seen.role[0]], BYTES.decode(seen.tokens[0, : seen.length[0]]), bool(seen.active[0])))
        text, ends = words if isinstance(words, tuple) else (words, True)
        state, rewards, done = step(KEY, state, *row(text, ends))
        paid.append({c: np.asarray(r).round(6).tolist() for c, r in rewards.items()})
    return prompts, paid, bool(done), state


def test_a_planner_sketches_and_a_coder_writes():
    prompts, (first, last), done, state = play("plan", "iad", "dai")
    assert prompts == [("planner", "P01,37,99>", True), ("coder", "C01,37,99|adi>", True)] and done
    assert not any(any(r) for r in first.values())
    assert last == {"tests": [1, 1], "operations": [0, 3], "excess": [0, 0], "invalid": [0, 0]}
    _, step, observe = compiled("plan")
    after, rewards, over = step(KEY, state, *row("dai"))  # nothing happens behind the end
    assert over and not any(np.any(r) for r in rewards.values()) and not observe(state).active[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_one_coder_alone():
    prompts, paid, done, _ = play("solo", "dai")
    assert prompts == [("coder", "C01,37,99>", True)] and done
    assert paid == [{"tests": [1], "operations": [3], "excess": [0], "invalid": [0]}]


def test_a_program_is_refined():
    """The last program and a sign for each shown example; every attempt is paid; the last one ends the episode."""
    said = ["ad", "i", "", "daiin", "dai", ("dai", False), "ii", "dai"]
    prompts, paid, done, state = play("refine", *said)
    entries = ["", "|ad---", "|i+--", "|?---", "|?---", "|dai+++", "|?---", "|ii---"]
    assert prompts == [("coder", f"C01,37,99{entry}>", True) for entry in entries]
    assert done and not compiled("refine")[2](state).active[0]
    assert [p["tests"][0] for p in paid] == pytest.approx([0, 0, 0, 0, 1, 0, 1 / 3, 1], abs=1e-6)
    assert [p["operations"][0] for p in paid] == [2, 1, 0, 0, 3, 0, 2, 3]
    assert [p["excess"][0] for p in paid] == [0] * 8
    assert [p["invalid"][0] for p in paid] == [0, 0, -1, -1, 0, -1, 0, 0]


def test_refinement_goes_on_from_any_state():
    """Two programs from one state: each has the prompt and the rewards of a line of play of its own."""
    _, step, observe = compiled("refine")
    *_, state = play("refine", "ad")
    for program, signs in (("dai", "+++"), ("i", "+--")):
        after, rewards, done = step(KEY, state, *row(program))
        seen = observe(after)
        assert BYTES.decode(seen.tokens[0, : seen.length[0]]) == f"C01,37,99|{program}{signs}>"
        assert not done and float(rewards["tests"][0]) == (program == "dai")


def test_the_number_of_attempts():
    env = programs.make(programs.Config(protocol="refine", attempts=3))
    assert env.max_turns == 3 and env.actors == ((0,),) * 3
    assert programs.make(CONFIGS["refine"]).max_turns == 8
    assert programs.prompt_length(CONFIGS["refine"]) == len("C01,37,99|abcd+-+>")


@pytest.mark.parametrize(
    "program, tests, used, beyond, invalid",
    [
        ("dai", 3, 3, 0, 0),
        ("idab", 0, 4, 1, 0),  # x + 1 - 2 (x + 1) is 8, 4, 3: never right
        ("daii", 0, 4, 1, 0),
        ("i", 0, 1, 0, 0),  # 2, 6, 7; fewer operations than the shortest program earn nothing
        ("ii", 1, 2, 0, 0),  # 3, 7, 8
        ("ad", 0, 2, 0, 0),  # well-formed, without a result
        ("daix", 0, 0, 0, -1),
        ("daidn", 0, 0, 0, -1),
        ("", 0, 0, 0, -1),
        ("DAI", 0, 0, 0, -1),
        (("dai", False), 0, 0, 0, -1),  # cut off: the program may have gone on
    ],
)
def test_rewards_of_programs(program, tests, used, beyond, invalid):
    _, (_, last), done, _ = play("plan", "adi", program)
    assert done and last["tests"] == pytest.approx([tests / 3] * 2, abs=1e-6)
    assert (last["operations"], last["excess"], last["invalid"]) == ([0, used], [0, beyond], [0, invalid])


@pytest.mark.parametrize(
    "sketch, shown", [("nnid", "dinn"), ("a", "a"), ("xyz", "?"), ("", "?"), ("aaaaa", "?"), (("ad", False), "?")]
)
def test_a_sketch_is_shown_in_the_order_of_the_alphabet(sketch, shown):
    prompts, (first, last), _, _ = play("plan", sketch, "dai")
    assert prompts[1][1] == f"C01,37,99|{shown}>"
    assert first["invalid"] == [-1.0 * (shown == "?"), 0] and last["tests"] == [1, 1]


# Tasks and demonstrations


def test_tasks_are_what_a_program_does_and_no_shorter_one():
    config = programs.Config(lengths=(1, 1, 2, 4))
    tasks = programs.make_tasks(config, 3, 120)
    assert np.bincount(tasks["shortest"], minlength=5).tolist()[4] > 40
    for shown, hidden, size in zip(tasks["shown"], tasks["hidden"], tasks["shortest"], strict=True):
        pairs = [*shown.tolist(), *hidden.tolist()]
        assert len({x for x, _ in pairs}) == 6
        fits = [p for p in EVERY if all(run(p, x) == y for x, y in pairs)]
        assert len(fits[0]) == size
        assert shown[:, 0].tolist() == sorted(shown[:, 0]) and hidden[:, 0].tolist() == sorted(hidden[:, 0])
    same = programs.make_tasks(config, 3, 120)
    assert all(np.array_equal(tasks[k], same[k]) for k in tasks)
    assert not np.array_equal(tasks["shown"], programs.make_tasks(config, 4, 120)["shown"])


def test_the_shown_examples_decide_the_side():
    for held_out in (False, True):
        tasks = programs.make_tasks(programs.Config(), 0, 200, held_out=held_out)
        texts = [",".join(f"{x}{y}" for x, y in shown) for shown in tasks["shown"].tolist()]
        assert {splits.is_held_out(text) for text in texts} == {held_out}


def fits(program, examples):
    """Whether a program does what a prompt's examples show."""
    return all(run(program, int(x)) == int(y) for x, y in examples.split(","))


def said(samples):
    for ids, length, reply, size in zip(*samples.values(), strict=True):
        ends = reply[size - 1] == BYTES.EOS
        yield BYTES.decode(ids[:length]), BYTES.decode(reply[: size - ends])


@pytest.mark.parametrize("name", CONFIGS)
def test_demonstrations_have_the_planted_mistakes(name):
    shown = programs.demonstrations(CONFIGS[name], 0, 600)
    assert set(shown) == set(attempts.ROLES[name])
    count = collections.Counter()
    for role, samples in shown.items():
        for prompt, reply in said(samples):
            found = re.fullmatch(r"([PC])(\d\d,\d\d,\d\d)(\|[abdghimn]{1,4})?([-+]{3})?>", prompt)
            assert found and found[1] == MARKS[role] and re.fullmatch("[abdghimn]{1,4}", reply)
            count[role] += 1
            if role == "planner":
                assert list(reply) == sorted(reply) and found[3] is None
                any_order = {"".join(p) for p in itertools.permutations(reply)}
                count["right sketch"] += any(fits(p, found[2]) for p in any_order)
            elif found[4]:
                before = found[3][1:]
                assert found[4] == "".join("+" if fits(before, x) else "-" for x in found[2].split(","))
                count["refined"] += 1
                count["repeated"] += reply == before
                count["right before"] += fits(before, found[2])
                assert reply == before or not fits(before, found[2])
                count["mended"] += fits(reply, found[2]) and not fits(before, found[2])
            elif found[3]:
                body = reply[:-2] if len(reply) > len(found[3]) - 1 else reply
                assert sorted(body) == list(found[3][1:]) and reply in (body, body + "nn")
                count["padded"] += body != reply
            if role == "coder":
                count["right program"] += fits(reply, found[2])
    shares = {k: v / 600 for k, v in count.items()}
    if name == "plan":
        assert 0.45 < shares["right sketch"] < 0.7  # half, and look-alikes that fit the three examples too
        assert 0.1 < shares["padded"] < 0.2  # 0.3 of the programs of one or two operations, half of all
    if name == "refine":
        assert 0.4 < shares["refined"] < 0.6 and 0.1 < shares["right before"] < 0.3 and shares["mended"] > 0.05
        assert shares["repeated"] < 0.5 < shares["right program"] + 0.1
    else:
        assert 0.25 < shares["right program"] < 0.55


def test_without_mistakes_demonstrations_are_right():
    config = programs.Config(lookalike_rate=0, order_error_rate=0, padding_rate=0)
    shown = programs.demonstrations(config, 1, 200)
    for prompt, reply in said(shown["coder"]):
        assert fits(reply, prompt[1:9])
        assert "".join(sorted(reply)) == prompt[10:-1]
    for prompt, reply in said(shown["planner"]):
        assert any(fits(order, prompt[1:9]) for order in itertools.permutations(reply))


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"protocol": "debate"}, r"config\.env\.args\.protocol: unknown value 'debate'"),
        ({"lengths": (1.0, 1.0)}, r"args\.lengths: expected a weight >= 0 for each of 1 operations, 2 operations, "),
        ({"lengths": (0.0, 0.0, 0.0, 0.0)}, r"args\.lengths: expected a weight >= 0"),
        ({"lookalike_rate": 1.5}, r"args\.lookalike_rate: expected a probability in .0, 1., got 1\.5"),
        ({"order_error": 0.5}, "order_error"),
        ({"tasks": 0}, r"args\.tasks: expected"),
        ({"attempts": 0}, r"args\.attempts: expected >= 1, got 0"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("programs", bad).check("config.env")
    assert "\n" not in str(error.value)
