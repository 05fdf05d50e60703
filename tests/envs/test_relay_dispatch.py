"""The relay environment against a game in plain Python, what its demonstrators show, and rewards that bind memory."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.agents import memory
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.array_env import EOS, PAD
from jaxmarl_llm.envs.relay_dispatch import array as relay
from jaxmarl_llm.envs.relay_dispatch.array import LOOK, SEP, Config
from jaxmarl_llm.errors import ConfigError

CONFIG = Config(tasks=256, table_seed=3)
R, COMPONENTS = CONFIG.response, ("accuracy", "pay", "format", "efficiency")
ENV = relay.make(CONFIG)
ROLES = ENV.roles
TASKS = relay.make_tasks(CONFIG)
KEY = jax.random.key(0)
reset, observe, step, verify = (jax.jit(f) for f in (ENV.reset, ENV.observe, ENV.step, ENV.verify))
SPELLED = {  # written apart from the generator: kind -> pattern with one group, the argument
    "add": r"(?:\+|ad|up)([1-9])",
    "turn": r"(?:\*|mv|go)([1-7])",
    "place": r"(?:=|pt|st)([a-h])",
    "look": r"(?:\?|of|at)([i-z]{2})",
}
KINDS = list(SPELLED)


# --- a game in plain Python ----------------------------------------------------------------------------------


def parse(operation):
    """(kind, argument) of an operation's text."""
    ((kind, found),) = ((k, m) for k, p in SPELLED.items() if (m := re.fullmatch(p, operation)))
    return kind, found[1]


def solve(operation, value, table):
    """The value behind an operation; ``table``: key -> digit."""
    kind, argument = parse(operation)
    letter, digit = value
    if kind == "add":
        return letter + str(int(digit) + int(argument))[-1]
    if kind == "turn":
        return ("abcdefgh" * 2)["abcdefgh".index(letter) + int(argument)] + digit
    return argument + digit if kind == "place" else letter + table[argument]


def text(tokens):
    return "".join(chr(t) for t in tokens if t < 256)


def table_of(config):
    return {key: str(digit) for key, digit in zip(relay.KEYS, relay.secret(config), strict=True)}


def read_task(tasks, i):
    """(start, operations, stake) from the columns that prompts are made of."""
    hops = int(tasks["hops"][i])
    return text(tasks["values"][i, 0]), [text(row) for row in tasks["spelled"][i, :hops]], float(tasks["stake"][i])


class Game:
    """Completions are lists of the sampled ids; the rest is strings, lists and ifs."""

    def __init__(self, start, operations, stake, config=CONFIG):
        self.operations, self.stake, self.config, self.each = operations, stake, config, len(config.mistakes)
        self.gold = [start]
        for operation in operations:
            self.gold.append(solve(operation, self.gold[-1], table_of(config)))
        self.turn, self.role, self.last, self.done, self.verdict = 0, 0, list(start.encode()), False, False

    @property
    def hop(self):
        return self.turn // 2

    def prompt(self):
        if self.turn % 2:
            head = "ABCDEFGHIJKLMNOP"[self.role - 1] + self.operations[self.hop]
        elif self.hop == len(self.operations):
            head = "R"
        else:
            head = "Q" + ";".join(self.operations[self.hop : self.hop + self.config.visible])
        return [*head.encode(), ord("|"), *self.last, ord(">")]

    def act(self, ids):
        if self.done:
            return 0.0, 0.0, 0.0, 0.0
        h, accuracy, form = len(self.operations), 0.0, 0.0
        cost = 0.1 * len(ids) / self.config.response / (2 * h + 1)
        ended = EOS in ids
        said = ids[: ids.index(EOS)] if ended else ids
        if self.turn % 2:
            self.verdict = ended and said == list(self.gold[self.hop + 1].encode())
            self.last, self.role = said[: self.config.response - 1], 0
        elif self.hop == h:
            self.verdict = ended and said == list(self.gold[-1].encode())
            accuracy, form, self.done = float(self.verdict), 0.1 * ended / (h + 1), True
        elif ended and len(said) == 1 and said[0] in list(b"ABCDEFGHIJKLMNOP")[: 4 * self.each]:
            self.role, form = 1 + said[0] - ord("A"), 0.1 / (h + 1)
            self.verdict = KINDS[(self.role - 1) // self.each] == parse(self.operations[self.hop])[0]
        else:
            self.verdict, self.done = False, True
        self.turn += 1
        return accuracy, accuracy * self.stake, form, cost


def row(ids, fill=PAD, size=R):
    """As a seat's tokens [1 R] and length [1]; ``fill`` is behind the completion and must not matter."""
    return np.array([[*ids, *[fill] * (size - len(ids))]], np.int32), np.array([len(ids)], np.int32)


def task(i, tasks=TASKS):
    return {name: value[i] for name, value in tasks.items()}


def ids_of(said):
    return [*said.encode(), EOS]


raw = st.lists(st.integers(0, 263), max_size=R)
near = st.lists(st.sampled_from([*b"ABHIac07>|", EOS, PAD, SEP]), max_size=R)  # garbage close to an action
right = st.sampled_from(["right", "right", "right", "right", "right", "no eos"])
move = st.one_of(right, right, right, st.sampled_from("ADHI").map(ids_of), st.just(ids_of("c4")), raw, near)
fill = st.sampled_from([PAD, EOS, ord("A"), ord("1")])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, CONFIG.tasks - 1), st.lists(move, min_size=12, max_size=12), fill)
def test_equals_a_game_in_plain_python(i, moves, fill):
    game, state = Game(*read_task(TASKS, i)), reset(KEY, task(i))
    for ids in moves:  # one more than an episode has
        if "right" in ids or "no eos" in ids:
            good = game.gold[-1] if game.done or game.hop == len(game.operations) else game.gold[game.hop + 1]
            if not game.turn % 2 and game.hop < len(game.operations):
                good = "ABCDEFGH"[2 * KINDS.index(parse(game.operations[game.hop])[0]) + i % 2]
            ids = ids_of(good)[: -1 if "no eos" in ids else None]
        seen = observe(state)
        assert bool(seen.active[0]) == (not game.done)
        if not game.done:
            assert seen.tokens[0, : int(seen.length[0])].tolist() == game.prompt()
            assert (np.asarray(seen.tokens[0, int(seen.length[0]) :]) == PAD).all()
            assert int(seen.role[0]) == game.role and game.role in ENV.actors[game.turn]
        expected = game.act(ids)
        state, rewards, done = step(KEY, state, *row(ids, fill))
        assert set(rewards) == set(COMPONENTS) and ENV.components == COMPONENTS
        for name, value in zip(COMPONENTS, expected, strict=True):
            np.testing.assert_allclose(rewards[name], np.full(len(ROLES), value), rtol=1e-6)
        assert bool(done) == bool(state.done) == game.done
        verdict = verify(state)
        np.testing.assert_array_equal(verdict["accuracy"], np.full(len(ROLES), float(game.verdict)))
        np.testing.assert_allclose(verdict["pay"], np.full(len(ROLES), game.verdict * game.stake))
        assert not np.any(verdict["format"]) and not np.any(verdict["efficiency"])


def test_a_golden_episode():
    """Three hops, every prompt and reward written out by hand; the key ip has the digit 4."""
    config = Config(table_seed=0)
    env, digits = relay.make(config), relay.secret(config)
    columns = relay.make_tasks(config, n=1)
    spelled, size = relay.pack([b"up3", b"of" + relay.KEYS[1].encode(), b"=f", b"", b""], 4)
    values = [b"c9", b"c2", b"c%d" % digits[1], b"f%d" % digits[1], b"", b""]
    one = {
        "hops": np.int32(3),
        "kinds": np.array([0, 3, 2, -1, -1], np.int32),
        "spelled": spelled,
        "spelled_length": size,
        "values": relay.pack(values, 2)[0],
        "stake": np.float32(0.5),
        "meaning": columns["meaning"][0],
    }
    key, d = relay.KEYS[1], str(digits[1])
    script = [
        ("master", f"Qup3;of{key}|c9>", "B", (0, 0, 0.025)),
        ("add_2", "Bup3|c9>", "c2", (0, 0, 0)),
        ("master", f"Qof{key};=f|c2>", "G", (0, 0, 0.025)),
        ("look_1", f"Gof{key}|c2>", f"c{d}", (0, 0, 0)),
        ("master", f"Q=f|c{d}>", "E", (0, 0, 0.025)),
        ("place_1", f"E=f|c{d}>", f"f{d}", (0, 0, 0)),
        ("master", f"R|f{d}>", f"f{d}", (1, 0.5, 0.025)),
    ]
    state = env.reset(KEY, one)
    for n, (role, prompt, said, pay) in enumerate(script):
        seen = env.observe(state)
        assert env.roles[int(seen.role[0])] == role
        assert text(seen.tokens[0, : int(seen.length[0])].tolist()) == prompt
        state, rewards, done = env.step(KEY, state, *row(ids_of(said)))
        for name, value in zip(COMPONENTS, (*pay, 0.1 / 7 * (len(said) + 1) / 4), strict=True):
            np.testing.assert_allclose(rewards[name], np.full(9, value), rtol=1e-6)
        assert bool(done) == (n == 6) and float(env.verify(state)["accuracy"][0]) == 1


def test_a_finished_state_stays_as_it_is():
    state = reset(KEY, task(0))
    state, _, _ = step(KEY, state, *row(ids_of("zz")))
    after, rewards, done = step(KEY, state, *row(ids_of("A")))
    assert done and not any(np.any(r) for r in rewards.values())
    jax.tree.map(np.testing.assert_array_equal, state, after)


# --- whole episodes, compiled --------------------------------------------------------------------------------


def perfect(tokens, length, role, table):
    """What a perfect member of the team writes, from its prompt alone."""
    head, last = text(tokens[:length].tolist())[:-1].split("|")
    if head[0] == "Q":
        return ids_of("ABCDEFGH"[2 * KINDS.index(parse(head[1:].split(";")[0])[0])])
    if head[0] == "R":
        return ids_of(last)
    assert head[0] == "ABCDEFGH"[role - 1] and ROLES[role].startswith(parse(head[1:])[0])
    return ids_of(solve(head[1:], last, table))


def test_a_perfect_team_solves_every_query():
    n, table = 128, table_of(CONFIG)
    tasks = {name: value[:n] for name, value in TASKS.items()}
    state = jax.jit(jax.vmap(ENV.reset, (None, 0)))(KEY, tasks)
    look, play = jax.jit(jax.vmap(ENV.observe)), jax.jit(jax.vmap(ENV.step, (None, 0, 0, 0)))
    total = dict.fromkeys(COMPONENTS, 0.0)
    for turn in range(ENV.max_turns):
        seen = jax.device_get(look(state))
        active = seen.active[:, 0]
        moves = [
            perfect(seen.tokens[i, 0], seen.length[i, 0], seen.role[i, 0], table) if active[i] else [] for i in range(n)
        ]
        tokens, length = map(np.stack, zip(*map(row, moves), strict=True))
        state, rewards, done = play(KEY, state, tokens, length)
        assert np.all(done == (turn >= 2 * tasks["hops"]))
        total = {name: total[name] + rewards[name] for name in total}
    ones = np.ones((n, len(ROLES)))
    np.testing.assert_array_equal(total["accuracy"], ones)
    np.testing.assert_allclose(total["pay"], ones * tasks["stake"][:, None])
    np.testing.assert_allclose(total["format"], 0.1 * ones, rtol=1e-5)
    hops = tasks["hops"][:, None]
    np.testing.assert_allclose(total["efficiency"], ones * 0.1 * (5 * hops + 3) / 4 / (2 * hops + 1), rtol=1e-5)


def episodes(tasks, tokens, length):
    """All turns under scan, as in a rollout; tokens [M W R]."""

    def turn(state, move):
        seen = ENV.observe(state)
        state, rewards, done = ENV.step(KEY, state, *move)
        return state, (seen, rewards, done, ENV.verify(state))

    return jax.lax.scan(turn, ENV.reset(KEY, tasks), (tokens, length))


def test_compiled_batches_equal_the_loop():
    rng, n, turns = np.random.default_rng(0), 24, ENV.max_turns
    tokens = rng.integers(0, 264, (n, turns, 1, R)).astype(np.int32)
    tokens[:, ::2, 0, 0], tokens[:, ::2, 0, 1] = rng.integers(ord("A"), ord("J"), (n, 6)), EOS
    length = rng.integers(1, R + 1, (n, turns, 1)).astype(np.int32)
    length[:12] = R  # half of the episodes go far
    tasks = {name: value[:n] for name, value in TASKS.items()}
    last, (seen, rewards, done, verdict) = jax.jit(jax.vmap(episodes))(tasks, tokens, length)
    assert 0 < int(done[:, 2].sum()) < n
    for i in range(n):
        state = reset(KEY, task(i))
        for t in range(turns):
            before = observe(state)
            state, *expected = step(KEY, state, tokens[i, t], length[i, t])
            got = jax.tree.map(lambda x, i=i, t=t: x[i, t], (seen, rewards, done, verdict))
            jax.tree.map(np.testing.assert_array_equal, (before, *expected, verify(state)), got)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i]), state, last)


@pytest.mark.parametrize(("response", "visible", "specialists"), [(3, 1, 2), (4, 5, 4), (9, 3, 3)])
def test_garbage_breaks_no_shape(response, visible, specialists):
    config = Config(response=response, visible=visible, mistakes=(0.2,) * specialists)
    env, P = relay.make(config), relay.prompt_length(config)
    assert len(env.roles) == 1 + 4 * specialists and 9 <= len(env.roles) <= 17
    watch, play = jax.jit(env.observe), jax.jit(env.step)
    state = env.reset(KEY, {name: value[0] for name, value in relay.make_tasks(config, n=1).items()})
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    rng = np.random.default_rng(response)
    moves = [np.array([[ord("A"), EOS, *[PAD] * (response - 2)]]), *rng.integers(-9, 999, (3, 1, response))]
    for tokens in moves:
        seen = watch(state)
        assert (seen.tokens.shape, seen.role.shape, seen.length.shape) == ((1, P), (1,), (1,))
        assert seen.active.shape == (1,) and seen.tokens.dtype == seen.role.dtype == seen.length.dtype == jnp.int32
        assert 0 < int(seen.length[0]) <= P and 0 <= int(seen.role[0]) < len(env.roles)
        state, rewards, done = play(KEY, state, jnp.asarray(tokens, jnp.int32), jnp.array([99]))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
        assert done.shape == () and all(np.all(np.isfinite(r)) for r in rewards.values())


def test_the_longest_prompt_fits():
    longest = {"hops": (0, 0, 0, 1), "mixture": (0, 0, 0, 1), "visible": 5}
    for config in (Config(**longest), Config(**{**longest, "visible": 2})):
        env, tasks = relay.make(config), relay.make_tasks(config, n=32)
        i = int((tasks["spelled_length"] == 4)[:, : config.visible].sum(1).argmax())
        state = env.reset(KEY, task(i, tasks))
        assert (
            int(env.observe(state).length[0])
            == 1 + tasks["spelled_length"][i, : config.visible].sum() + (config.visible - 1) + 1 + 2 + 1
        )
        assert relay.prompt_length(config) == 1 + 4 * config.visible + (config.visible - 1) + 1 + 3 + 1
        assert relay.entry_length(config) == relay.prompt_length(config) + R + 1
    assert relay.prompt_length(CONFIG) + relay.entry_length(CONFIG) == 35  # with one memory entry


def test_the_number_of_turns_follows_the_longest_query():
    for hops, turns in (((1, 1, 1, 1), 11), ((1, 0, 0, 0), 5), ((0, 1, 1, 0), 9)):
        config = Config(hops=hops)
        env, tasks = relay.make(config), relay.make_tasks(config, n=64)
        assert env.max_turns == len(env.actors) == turns and tasks["hops"].max() == (turns - 1) // 2
        assert tasks["kinds"].shape == (64, (turns - 1) // 2)
    assert ENV.actors == ((0,), *((tuple(range(1, 9)), (0,)) * 5))


# --- the verifier --------------------------------------------------------------------------------------------


def test_a_noisy_verifier_flips_verdicts_of_its_roles():
    noise = [0.0] * len(ROLES)
    noise[0], noise[1] = 0.3, 1.0  # the master, and add_1
    config = Config(verify_noise=tuple(noise), mixture=(1, 0, 0, 0))
    env, tasks = relay.make(config), relay.make_tasks(config, n=600)
    keys = jax.random.split(jax.random.key(1), 600)
    state = jax.vmap(env.reset)(keys, tasks)
    moves = lambda texts: [jnp.array(x) for x in map(np.stack, zip(*(row(ids_of(t)) for t in texts), strict=True))]
    gold = [text(v) for v in tasks["values"][:, 1]]
    play = jax.jit(jax.vmap(env.step))
    routed, _, _ = play(keys, state, *moves("AB"[i % 2] for i in range(600)))
    wrong = 1 - np.asarray(jax.vmap(env.verify)(routed)["accuracy"])[:, 0]
    assert abs(wrong.mean() - 0.3) < 0.08  # every route is right
    answered, rewards, _ = play(keys, routed, *moves(gold))
    right = np.asarray(jax.vmap(env.verify)(answered)["accuracy"])[:, 0]
    np.testing.assert_array_equal(right, np.arange(600) % 2)  # add_1 always flipped, add_2 never
    assert not np.any(rewards["accuracy"])  # what is paid has no noise
    one = relay.make(Config(verify_noise=(1.0,)))
    after, _, _ = one.step(KEY, one.reset(KEY, task(0)), *row(ids_of("zz")))
    assert float(one.verify(after)["accuracy"][0]) == 1  # one value holds for all roles


# --- tasks ---------------------------------------------------------------------------------------------------


def test_tasks_are_what_they_say():
    table, meanings = table_of(CONFIG), {}
    for i in range(CONFIG.tasks):
        start, operations, stake = read_task(TASKS, i)
        hops = len(operations)
        assert 2 <= hops <= 5 and stake in (0.25, 0.5, 1.0)
        value = start
        for hop, operation in enumerate(operations):
            kind, argument = parse(operation)
            value = solve(operation, value, table)
            assert text(TASKS["values"][i, hop + 1]) == value and KINDS[TASKS["kinds"][i, hop]] == kind
            assert kind != "look" or argument in relay.KEYS[: CONFIG.keys]
        assert (TASKS["kinds"][i, hops:] == -1).all() and not TASKS["spelled_length"][i, hops:].any()
        meaning = (start, *map(parse, operations))
        row_of = tuple(TASKS["meaning"][i].tolist())
        assert meanings.setdefault(row_of, meaning) == meaning  # one number for one meaning
    assert len(set(meanings.values())) == len(meanings) > 250


def test_every_operation_has_three_spellings_and_one_side():
    seen = {}
    for i in range(CONFIG.tasks):
        for operation in read_task(TASKS, i)[1]:
            seen.setdefault(parse(operation), set()).add(operation)
    assert Counter(map(len, seen.values()))[3] > 20 and max(map(len, seen.values())) == 3
    plain = relay.make_tasks(Config(spellings=1), n=64)
    assert all(len(o) <= 3 and o[0] in "+*=?" for i in range(64) for o in read_task(plain, i)[1])
    rows = [((0, 2), (3, 1)), ((0, 2), (3, 1))]
    first, second = (relay.Query("c7", ops, spelled) for ops, spelled in zip(rows, ((0, 0), (2, 1)), strict=True))
    assert first.spelled != second.spelled and first.content == second.content


def test_tasks_follow_from_the_seeds():
    again = relay.make_tasks(CONFIG, CONFIG.seed, CONFIG.tasks)
    assert all(np.array_equal(TASKS[name], again[name]) for name in TASKS)
    other = relay.make_tasks(Config(tasks=256, table_seed=4))
    assert np.array_equal(other["meaning"], TASKS["meaning"])
    changed = (other["values"] != TASKS["values"]).any((1, 2))
    assert changed.any() and (TASKS["kinds"][changed] == LOOK).any(1).all()
    assert not np.array_equal(relay.make_tasks(CONFIG, 1)["meaning"], TASKS["meaning"])


def test_parts_of_the_held_out_tasks():
    held_out = relay.make_tasks(CONFIG, n=128, held_out=True)
    parts = relay.parts(CONFIG, held_out)
    looks = [any(parse(o)[0] == "look" for o in read_task(held_out, i)[1]) for i in range(128)]
    np.testing.assert_array_equal(parts["with_look"], looks)
    np.testing.assert_array_equal(parts["without_look"], ~np.array(looks))
    assert 20 < sum(looks) < 108


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response", 2), ("hops", (1, 1, 1)), ("hops", (0, 0, 0, 0)), ("mixture", (1, 1, 1, -1)), ("stakes", (0, 0, 0)),
        ("mistakes", (0.5,)), ("mistakes", (0.5,) * 5), ("mistakes", (0.5, 1.5)), ("verify_noise", (0.1, 0.1)),
        ("verify_noise", ()), ("keys", 17), ("spellings", 4), ("visible", 6), ("misroute", 1.5),
    ],
)  # fmt: skip
def test_bad_values_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"^config\.env\.args\.{key}: expected"):
        from_dict(Config, {key: value}, "config.env.args")


# --- rewards and memory --------------------------------------------------------------------------------------


def thresholds(rewards):
    """The memory's lo and hi behind a sample of rewards."""
    config, n = memory.MemoryConfig(capacity=4, retrieve=1), len(rewards)
    store = memory.init(config, dim=2, max_ids=1, max_bytes=1)
    samples = memory.Samples(
        keys=jnp.ones((n, 2)), ids=jnp.zeros((n, 1), jnp.int32), length=jnp.ones(n, jnp.int32),
        text=jnp.zeros((n, 1), jnp.uint8), reward=jnp.asarray(rewards, jnp.float32),
        retrieved=jnp.full((n, 1), -1), similarity=jnp.zeros((n, 1)), valid=jnp.ones(n, bool),
    )  # fmt: skip
    seen = memory.update(config, store, samples, 1)[1]
    return float(seen["lo"]), float(seen["hi"])


@pytest.mark.parametrize("success", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_memory_threshold_lies_inside_the_range_of_the_pay(success):
    """At every rate of success some rewards are at or above mean + 1.96 s. For 0 and 1 that is so up to 0.21."""
    rng, stake = np.random.default_rng(0), relay.make_tasks(Config(), n=2000)["stake"]
    solved = rng.random(2000) < success
    form = 0.1 * np.where(solved, 1.0, rng.random(2000).round(1))
    rewards = solved * stake + form
    _, hi = thresholds(rewards)
    assert hi == pytest.approx(rewards.mean() + 1.96 * rewards.std(), rel=1e-3) and hi < rewards.max() - 0.05
    assert 0.005 < (rewards >= hi).mean() < 0.2
    plain = solved + form
    assert (thresholds(plain)[1] < plain.max() - 0.05) == (success < 0.2)


# --- demonstrations ------------------------------------------------------------------------------------------


def read(samples):
    """(entries, prompt, completion) as strings; the tokens are checked on the way."""
    rows = []
    for i in range(len(samples["length"])):
        tokens, length = samples["tokens"][i], samples["length"][i]
        completion, size = samples["completion"][i], samples["completion_length"][i]
        assert (tokens[length:] == PAD).all() and (completion[size:] == PAD).all()
        assert completion[size - 1] == EOS and (completion[: size - 1] < 256).all()
        *entries, prompt = "".join(chr(t) if t < 256 else {SEP: "\0"}[t] for t in tokens[:length]).split("\0")
        rows.append((entries, prompt, text(completion[: size - 1])))
    return rows


@pytest.fixture(scope="module")
def shown():
    samples = relay.demonstrations(CONFIG, 0, 1500)
    assert tuple(samples) == ROLES
    return {role: read(rows) for role, rows in samples.items()}


def assert_rate(flags, rate):
    flags = np.array(list(flags), float)
    assert len(flags) > 150 and abs(flags.mean() - rate) < 4 * 0.5 / len(flags) ** 0.5, (flags.mean(), rate)


def first_kind(prompt):
    return KINDS.index(parse(prompt[1:].split("|")[0].split(";")[0])[0])


def test_master_demonstrations(shown):
    rows = shown["master"]
    replies = [(p, c) for _, p, c in rows if p[0] == "R"]
    assert all(p == f"R|{c}>" for p, c in replies)
    assert_rate((p[0] == "R" for _, p, _ in rows), np.mean([1 / (h + 1) for h in (2, 3, 4, 5)]))
    alone = [(p, c) for entries, p, c in rows if p[0] == "Q" and not entries]
    assert_rate(("ABCDEFGH".index(c) // 2 != first_kind(p) for p, c in alone), 0.3)
    assert_rate(("ABCDEFGH".index(c) % 2 for _, c in alone), 0.5)  # it does not know who is reliable


def test_no_demonstration_of_the_master_is_of_a_held_out_task():
    config = Config(hops=(1, 0, 0, 0), visible=2)  # the prompt of the first turn shows the whole query
    canonical = {"ad": "+", "up": "+", "mv": "*", "go": "*", "pt": "=", "st": "=", "of": "?", "at": "?"}
    whole = []
    for entries, prompt, _ in read(relay.demonstrations(config, 0, 1200)["master"]):
        for part in (*entries, prompt):
            head, value = part.split(">")[0].split("|")
            if head.count(";"):
                short = [canonical.get(o[:2], o[:1]) + parse(o)[1] for o in head[1:].split(";")]
                whole.append(" ".join([value, *short]))
    assert len(whole) > 300 and not any(map(splits.is_held_out, whole))


def test_specialists_differ_in_their_mistakes(shown):
    for role in ROLES[1:]:
        mark = "ABCDEFGH"[ROLES.index(role) - 1]
        assert all(p[0] == mark and p[1:] and role.startswith(parse(p[1:].split("|")[0])[0]) for _, p, _ in shown[role])
        if not role.startswith("look"):
            solved = (solve(*p[1:-1].split("|"), {}) != c for _, p, c in shown[role])
            assert_rate(solved, 0.1 if role.endswith("1") else 0.5)


def test_memory_entries(shown):
    for rows in shown.values():
        assert_rate((bool(entries) for entries, _, _ in rows), 0.5)
        assert {len(entries) for entries, _, _ in rows} == {0, 1, 2}
        respelled = 0
        for entries, prompt, _ in rows:
            operation = prompt[1:].split("|")[0].split(";")[0]
            for entry in entries:
                asked, said = entry.split(">")
                assert len(entry) + 1 <= relay.entry_length(CONFIG) and asked[0] in (prompt[0], "Q", "R")
                other = asked[1:].split("|")[0].split(";")[0]
                same = prompt[0] == asked[0] != "R" and parse(other) == parse(operation)
                respelled += same and other != operation
                if asked[0] == "R":
                    assert asked[2:] == said
                elif asked[0] == "Q":
                    assert "ABCDEFGH".index(said) // 2 == first_kind(asked)
                elif parse(other)[0] != "look":
                    assert said == solve(other, asked.split("|")[1], {})  # entries are successes
        assert respelled > 100


def test_a_look_repeats_the_digit_of_an_entry_in_any_spelling(shown):
    relevant, blind = [], []
    for entries, prompt, completion in shown["look_1"]:
        operation, last = prompt[1:-1].split("|")
        known = {parse(e[1:].split("|")[0]): e[-1] for e in entries}
        if parse(operation) in known:
            relevant.append(completion == last[0] + known[parse(operation)])
        else:
            blind.append(completion[1])
    assert len(relevant) > 300
    assert_rate(relevant, 0.9)  # the others are the mistakes of look_1
    guesses = Counter(blind)
    assert set(guesses) == set("0123456789") and max(guesses.values()) < 2 * len(blind) / 10


def test_demonstrations_do_not_know_the_table():
    one, two = (relay.demonstrations(Config(table_seed=s), 1, 50) for s in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_rates_context_and_noise_are_arguments():
    config = Config(misroute=1.0, mistakes=(1.0, 1.0), memory=1.0, related=1.0)
    bare = relay.demonstrations(config, 0, 60, context=0)
    assert bare["master"]["tokens"].shape == (60, 15) and bare["master"]["completion"].shape == (60, 4)
    assert not any("ABCDEFGH".index(c) // 2 == first_kind(p) for _, p, c in read(bare["master"]) if p[0] == "Q")
    assert not any(solve(*p[1:-1].split("|"), {}) == c for _, p, c in read(bare["add_1"]))
    full = relay.demonstrations(config, 0, 60, context=3, noise=0.0)
    assert full["master"]["tokens"].shape == (60, 15 + 3 * 20)
    for entries, prompt, completion in read(full["turn_2"]):
        operation, last = prompt[1:-1].split("|")
        assert entries and {parse(e[1:].split("|")[0]) for e in entries} == {parse(operation)}
        assert completion == solve(operation, last, {})
