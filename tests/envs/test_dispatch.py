"""The dispatch environment against a twin in plain Python, and what its demonstrators show."""

import re
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.dispatch import array as dispatch
from jaxmarl_llm.envs.dispatch.array import EOS, PAD, ROLES, SEP, Config
from jaxmarl_llm.errors import ConfigError

CONFIG = Config(tasks=256, table_seed=3)
R = CONFIG.response
ENV = dispatch.make(CONFIG)
TASKS = dispatch.make_tasks(CONFIG)
TABLE = dispatch.secret(CONFIG)
KEY = jax.random.key(0)
QUERIES = {  # written apart from the generator
    "a": r"\d[+*-]\d",
    "l": r"cap\?[a-z]",
    "f": r"(set|add|cut) [u-z] \d",
    "t": r"rev [a-z]{3}|dup [a-z]{2}|rot [a-z]{3}",
}
reset, observe, step, verify = (jax.jit(f) for f in (ENV.reset, ENV.observe, ENV.step, ENV.verify))


# --- a twin in plain Python --------------------------------------------------


def letter_of(query):
    (letter,) = (letter for letter, pattern in QUERIES.items() if re.fullmatch(pattern, query))
    return letter


def solve(query, table=TABLE):
    letter = letter_of(query)
    if letter == "a":
        return str(eval(query))
    if letter == "l":
        return f"{table[ord(query[4]) - ord('a')]}"
    if letter == "f":
        verb, device, digit = query.split()
        return device + {"set": "(", "add": "(+", "cut": "(-"}[verb] + digit + ")"
    verb, word = query.split()
    if verb == "rot":
        return "".join(word[(i + 1) % 3] for i in range(3))
    return "".join(reversed(word)) if verb == "rev" else word * 2


class Twin:
    """Completions are lists of the sampled ids; the rest is strings, lists and ifs."""

    def __init__(self, query):
        self.query, self.gold = query, solve(query)
        self.turn, self.role, self.said, self.done, self.verdict = 0, 0, [], False, False

    def prompt(self):
        query = list(self.query.encode())
        if self.turn == 0:
            return [ord("Q"), *query, ord(">")]
        if self.turn == 1:
            return [ord("Qalft"[self.role]), *query, ord(">")]
        return [ord("R"), *query, ord("|"), *self.said, ord(">")]

    def act(self, ids):
        if self.done:
            return 0.0, 0.0, 0.0
        ended = EOS in ids
        text = ids[: ids.index(EOS)] if ended else ids
        right = ended and text == list(self.gold.encode())
        accuracy, form, cost = 0.0, 0.0, 0.1 * len(ids) / 7
        if self.turn == 0:
            if ended and len(text) == 1 and text[0] in list(b"alft"):
                form, self.role = 0.25, 1 + b"alft".index(text[0])
                self.verdict = "alft"[self.role - 1] == letter_of(self.query)
            else:
                self.done, self.verdict = True, False
        elif self.turn == 1:
            self.said, self.role, self.verdict = text[:6], 0, right
        else:
            accuracy, form = 1.0 * right, 0.25 * ended
            self.done, self.verdict = True, right
        self.turn += 1
        return accuracy, form, cost


def row(ids, fill=PAD):
    """As a seat's tokens [1 R] and length [1]; ``fill`` stands behind the completion and must not matter."""
    return np.array([[*ids, *[fill] * (R - len(ids))]], np.int32), np.array([len(ids)], np.int32)


def task(i):
    return {name: value[i] for name, value in TASKS.items()}


def ids_of(text):
    return [*text.encode(), EOS]


raw = st.lists(st.integers(0, 263), max_size=R)
near = st.lists(st.sampled_from([*b"alft019(+-)x", EOS, PAD, SEP]), max_size=R)  # garbage close to an action
longer = st.tuples(st.sampled_from("alft"), st.text("alft>", max_size=4)).map("".join).map(ids_of)
right = st.sampled_from(["right", "right", "right without eos"])
move = st.one_of(right, right, longer, st.sampled_from("alft").map(ids_of), st.just(ids_of("42")), raw, near)
fill = st.sampled_from([PAD, EOS, ord("l"), ord("1")])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, CONFIG.tasks - 1), st.lists(move, min_size=4, max_size=4), fill)
def test_equals_a_twin_in_plain_python(i, moves, fill):
    twin, state = Twin(dispatch.query_text(TASKS, i)), reset(KEY, task(i))
    for ids in moves:  # one more than an episode has
        if "right" in ids:
            ids = ids_of(letter_of(twin.query) if twin.turn == 0 else twin.gold)[: -1 if "eos" in ids else None]
        seen = observe(state)
        assert bool(seen.active[0]) == (not twin.done)
        if not twin.done:
            assert seen.tokens[0, : int(seen.length[0])].tolist() == twin.prompt()
            assert (np.asarray(seen.tokens[0, int(seen.length[0]) :]) == PAD).all()
            assert int(seen.role[0]) == twin.role
            assert int(seen.role[0]) in ENV.actors[twin.turn]
        expected = twin.act(ids)
        state, rewards, done = step(KEY, state, *row(ids, fill))
        assert set(rewards) == set(ENV.components)
        for name, value in zip(("accuracy", "format", "efficiency"), expected, strict=True):
            np.testing.assert_allclose(rewards[name], np.full(5, value), rtol=1e-6)
        assert bool(done) == bool(state.done) == twin.done
        verdict = verify(state)
        np.testing.assert_array_equal(verdict["accuracy"], np.full(5, float(twin.verdict)))
        assert not np.any(verdict["format"]) and not np.any(verdict["efficiency"])


def test_a_finished_state_stays_as_it_is():
    for moves in (["zz"], ["t", "x", "y"]):
        state = reset(KEY, task(0))
        for text in moves:
            state, _, _ = step(KEY, state, *row(ids_of(text)))
        after, _, done = step(KEY, state, *row(ids_of("a")))
        assert done
        jax.tree.map(np.testing.assert_array_equal, state, after)


# --- whole episodes, compiled ------------------------------------------------


def perfect(tokens, length, role):
    """What a perfect member of the team writes, from its prompt alone."""
    text = bytes(tokens[:length].tolist()).decode()
    head, query = text[0], text[1:-1]
    if head == "Q":
        return ids_of(letter_of(query))
    if head == "R":
        return ids_of(query.split("|")[1])
    assert head == letter_of(query) == "Qalft"[role]
    return ids_of(solve(query))


def test_a_perfect_team_solves_every_kind():
    n = CONFIG.tasks
    state = jax.jit(jax.vmap(ENV.reset, (None, 0)))(KEY, TASKS)
    observe, verify = jax.jit(jax.vmap(ENV.observe)), jax.jit(jax.vmap(ENV.verify))
    step = jax.jit(jax.vmap(ENV.step, (None, 0, 0, 0)))
    total = dict.fromkeys(ENV.components, 0.0)
    for turn in range(3):
        seen = jax.device_get(observe(state))
        moves = [perfect(seen.tokens[i, 0], seen.length[i, 0], seen.role[i, 0]) for i in range(n)]
        tokens, length = map(np.stack, zip(*map(row, moves), strict=True))
        state, rewards, done = step(KEY, state, tokens, length)
        assert np.all(done == (turn == 2))
        assert np.all(verify(state)["accuracy"] == 1)
        total = {name: total[name] + rewards[name] for name in total}
    assert set(TASKS["kind"]) == {0, 1, 2, 3}
    np.testing.assert_array_equal(total["accuracy"], np.ones((n, 5)))
    np.testing.assert_array_equal(total["format"], np.full((n, 5), 0.5))
    spoken = 2 + 2 * (TASKS["answer_length"] + 1)
    np.testing.assert_allclose(total["efficiency"], np.tile(0.1 * spoken[:, None] / R, 5), rtol=1e-5)


def episodes(tasks, tokens, length):
    """All turns under scan, as in a rollout; tokens [M W R]."""

    def turn(state, move):
        seen = ENV.observe(state)
        state, rewards, done = ENV.step(KEY, state, *move)
        return state, (seen, rewards, done, ENV.verify(state))

    return jax.lax.scan(turn, ENV.reset(KEY, tasks), (tokens, length))


def garbage(rng, n):
    tokens = rng.integers(0, 264, (n, 3, 1, R)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.2] = EOS
    sane = rng.random(n) < 0.7  # most episodes go past the first turn
    tokens[sane, 0, 0, :2] = np.stack([rng.choice(list(b"alft"), sane.sum()), np.full(sane.sum(), EOS)], 1)
    return tokens, rng.integers(0, R + 1, (n, 3, 1)).astype(np.int32)


def test_compiled_batches_equal_the_loop():
    tokens, length = garbage(np.random.default_rng(0), 48)
    tasks = {name: value[:48] for name, value in TASKS.items()}
    last, (seen, rewards, done, verdict) = jax.jit(jax.vmap(episodes))(tasks, tokens, length)
    assert 0 < int(done[:, 0].sum()) < 48
    for i in range(48):
        state = reset(KEY, task(i))
        for t in range(3):
            expected = observe(state), *step(KEY, state, tokens[i, t], length[i, t])[1:]
            state = step(KEY, state, tokens[i, t], length[i, t])[0]
            got = jax.tree.map(lambda x, i=i, t=t: x[i, t], (seen, rewards, done, verdict))
            jax.tree.map(np.testing.assert_array_equal, (*expected, verify(state)), got)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i]), state, last)


@pytest.mark.parametrize("response", [6, 7, 12])
def test_garbage_breaks_no_shape(response):
    config = Config(response=response)
    env, P = dispatch.make(config), dispatch.prompt_length(config)
    observe, step = jax.jit(env.observe), jax.jit(env.step)
    state = env.reset(KEY, {name: value[0] for name, value in dispatch.make_tasks(config, n=1).items()})
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    rng = np.random.default_rng(response)
    moves = [np.array([[ord("f"), EOS, *[PAD] * (response - 2)]]), *rng.integers(-9, 999, (3, 1, response))]
    for tokens in moves:
        seen = observe(state)
        assert (seen.tokens.shape, seen.role.shape, seen.length.shape) == ((1, P), (1,), (1,))
        assert seen.active.shape == (1,) and seen.tokens.dtype == seen.role.dtype == seen.length.dtype == jnp.int32
        assert 0 < int(seen.length[0]) <= P and 0 <= int(seen.role[0]) < 5
        state, rewards, done = step(KEY, state, jnp.asarray(tokens, jnp.int32), jnp.array([99]))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
        assert done.shape == () and all(np.all(np.isfinite(r)) and r.shape == (5,) for r in rewards.values())
        assert float(rewards["efficiency"][0]) < 1.001 * config.efficiency


def test_the_longest_prompt_and_entry_fit():
    state = reset(KEY, task(int(TASKS["query_length"].argmax())))
    state, _, _ = step(KEY, state, *row(ids_of("f")))
    state, _, _ = step(KEY, state, *row([7] * R))  # a specialist that does not stop
    seen = observe(state)
    assert int(seen.length[0]) == dispatch.prompt_length(CONFIG) == 16
    assert seen.tokens[0, 9:].tolist() == [7] * 6 + [ord(">")]
    assert dispatch.entry_length(CONFIG) == 16 + R + 1


# --- tasks -------------------------------------------------------------------


def test_tasks_are_what_they_say():
    for i in range(CONFIG.tasks):
        query = dispatch.query_text(TASKS, i)
        assert "alft".index(letter_of(query)) == TASKS["kind"][i]
        assert TASKS["query_length"][i] == len(query)
        gold = TASKS["answer"][i, : TASKS["answer_length"][i]]
        assert bytes(gold.tolist()).decode() == solve(query)
        assert "-" not in solve(query)[:1]  # no negative numbers
        assert (TASKS["query"][i, len(query) :] == PAD).all()
        assert (TASKS["answer"][i, len(gold) :] == PAD).all()
    heads = [{dispatch.query_text(TASKS, i)[0] for i in np.flatnonzero(TASKS["kind"] == k)} for k in range(4)]
    assert heads[2] & heads[1] and heads[0] <= set("0123456789")  # function and lookup share a first letter


def test_tasks_follow_from_the_seeds():
    def equal(a, b):
        return all(np.array_equal(a[name], b[name]) for name in a)

    again = dispatch.make_tasks(CONFIG, CONFIG.seed, CONFIG.tasks)
    other = dispatch.make_tasks(CONFIG, CONFIG.seed + 1)
    assert equal(TASKS, again) and not equal(TASKS, other)
    poor = Config(tasks=256, table_seed=3, misroute=0.1, wrong_product=1.0, rot_as_rev=0.0, memory=0.0)
    assert equal(TASKS, dispatch.make_tasks(poor))
    table = dispatch.make_tasks(Config(tasks=256, table_seed=4))
    assert np.array_equal(table["query"], TASKS["query"])
    changed = (table["answer"] != TASKS["answer"]).any(1)
    assert changed.any() and set(TASKS["kind"][changed]) == {1}
    assert len(set(TABLE)) == 26 and set(TABLE) <= set(dispatch.VALUES)


def test_the_mixture_is_obeyed():
    kinds = dispatch.make_tasks(Config(mixture=(1, 0, 2, 1)), seed=5, n=4000)["kind"]
    np.testing.assert_allclose(np.bincount(kinds, minlength=4) / 4000, [0.25, 0, 0.5, 0.25], atol=0.03)


@pytest.mark.parametrize(
    ("key", "value"),
    [("response", 5), ("mixture", (1, 1, 1)), ("mixture", (0, 0, 0, 0)), ("mixture", (1, 1, 1, -1)), ("misroute", 1.5)],
)
def test_bad_values_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"^config\.env\.args\.{key}: expected"):
        from_dict(Config, {key: value}, "config.env.args")


# --- demonstrations ----------------------------------------------------------


def read(samples, role):
    """(entries, prompt, completion) as strings; the tokens are checked on the way."""
    rows = []
    for i in range(len(samples[role]["length"])):
        tokens, length = samples[role]["tokens"][i], samples[role]["length"][i]
        completion, size = samples[role]["completion"][i], samples[role]["completion_length"][i]
        assert (tokens[length:] == PAD).all() and (completion[size:] == PAD).all()
        assert completion[size - 1] == EOS and (completion[: size - 1] < 256).all()
        *entries, prompt = "".join(chr(t) if t < 256 else {SEP: "\0"}[t] for t in tokens[:length]).split("\0")
        rows.append((entries, prompt, bytes(completion[: size - 1].tolist()).decode()))
    return rows


@pytest.fixture(scope="module")
def shown():
    samples = dispatch.demonstrations(CONFIG, 0, 4000)
    assert tuple(samples) == ROLES
    return {role: read(samples, role) for role in ROLES}


def share(flags):
    """Mean and four standard errors."""
    flags = np.array(list(flags), float)
    assert len(flags) > 150
    return flags.mean(), 4 * 0.5 / len(flags) ** 0.5


def assert_rate(flags, rate):
    mean, error = share(flags)
    assert abs(mean - rate) < error, (mean, rate, error)


def test_master_demonstrations(shown):
    routes = [(p[1:-1], c) for _, p, c in shown["master"] if p[0] == "Q"]
    assert_rate((p[0] == "Q" for _, p, _ in shown["master"]), 0.5)
    assert_rate((c == "t" for q, c in routes if letter_of(q) == "f"), 0.6)
    assert_rate((c == "f" for q, c in routes if letter_of(q) == "f"), 0.4)
    assert all(c == letter_of(q) for q, c in routes if letter_of(q) != "f")
    replies = [(p[1:-1].split("|"), c) for _, p, c in shown["master"] if p[0] == "R"]
    assert all(said == c for (_, said), c in replies)
    assert_rate((said != solve(q) for (q, said), _ in replies if letter_of(q) == "f"), 0.6)
    assert_rate((said != solve(q) for (q, said), _ in replies if q[:3] == "rot"), 0.55)


def test_specialist_demonstrations(shown):
    for role in ROLES[1:]:
        assert all(p[0] == role[0] == letter_of(p[1:-1]) for _, p, _ in shown[role])  # of its own kind only
    sums = [(p[1:-1], c) for _, p, c in shown["arithmetic"]]
    assert_rate((solve(q) != c for q, c in sums if "*" in q), 0.5)
    assert all(solve(q) == c for q, c in sums if "*" not in q)
    wrong = Counter(int(c) for q, c in sums if solve(q) != c)
    assert min(wrong) < 5 and max(wrong) in range(76, 82) and max(wrong.values()) < 30
    edits = [(p[1:-1], c) for _, p, c in shown["transform"]]
    assert_rate((c == solve("rev" + q[3:]) for q, c in edits if q[:3] == "rot"), 0.55)
    assert_rate((c == solve(q) for q, c in edits if q[:3] == "rot"), 0.45)
    assert all(solve(q) == c for q, c in edits if q[:3] != "rot")
    assert all(solve(p[1:-1]) == c for _, p, c in shown["function"])


def test_memory_entries(shown):
    P = dispatch.prompt_length(CONFIG)
    for role, rows in shown.items():
        assert_rate((bool(entries) for entries, _, _ in rows), 0.5)
        assert_rate((len(entries) == 2 for entries, _, _ in rows if entries), 0.5)
        assert {len(entries) for entries, _, _ in rows} == {0, 1, 2}
        seen, same = defaultdict(set), []
        for entries, prompt, _ in rows:
            values = defaultdict(set)
            for entry in entries:
                asked, said = entry.split(">")
                assert len(entry) + 1 <= dispatch.entry_length(CONFIG) and len(asked) < P
                query = asked[1:].split("|")[0]
                seen[asked[0]].add(letter_of(query))
                same.append(query == prompt[1:-1].split("|")[0])
                if query[:3] == "cap" and asked[0] != "Q":
                    values[query].add(said)
                elif asked[0] == "Q":
                    assert said == letter_of(query)
                else:
                    assert said == solve(query)  # entries are successes
                if asked[0] == "R":
                    assert asked.split("|")[1] == said
            assert all(len(v) == 1 for v in values.values())  # one sample does not contradict itself
        assert np.mean(same) > 0.45
        assert seen == ({"Q": set("alft"), "R": set("alft")} if role == "master" else {role[0]: {role[0]}})


def test_lookup_repeats_memory_and_guesses_without(shown):
    relevant, blind = 0, []
    for entries, prompt, completion in shown["lookup"]:
        known = {asked: said for asked, said in (entry.split(">") for entry in entries)}
        if prompt[:-1] in known:
            relevant += 1
            assert completion == known[prompt[:-1]]
        else:
            blind.append((prompt, completion))
    assert relevant > 1000
    guesses = Counter(int(c) for _, c in blind)
    assert set(guesses) == set(range(10, 40)) and max(guesses.values()) < 3 * len(blind) / 30
    right = sum(solve(p[1:-1]) == c for p, c in blind)
    assert right < 3 * len(blind) / 30  # chance, neither taught nor excluded
    assert right > 0


def test_demonstrations_do_not_know_the_table():
    one, two = (dispatch.demonstrations(Config(table_seed=s), 1, 300) for s in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    three = dispatch.demonstrations(Config(), 2, 300)
    assert any(not np.array_equal(one[r]["tokens"], three[r]["tokens"]) for r in ROLES)


def test_imitation_solves_at_most_60_percent(shown):
    """Each role does, always or in proportion, what its demonstrations do without memory; products count as known."""
    kinds = {"a": [], "l": [], "f": [], "t": []}
    right = defaultdict(list)
    for role in ROLES[1:]:
        for entries, prompt, completion in shown[role]:
            if not entries:
                right[role[0], prompt[1:4] if role[0] == "t" else ""].append(solve(prompt[1:-1]) == completion)
    for entries, prompt, completion in shown["master"]:
        if not entries and prompt[0] == "Q":
            kinds[letter_of(prompt[1:-1])].append(completion)
    greedy, sampled = [], []
    for letter, routes in kinds.items():
        skills = [np.mean(flags) for (owner, _), flags in right.items() if owner == letter]
        best = Counter(routes).most_common(1)[0][0] == letter
        greedy.append(best * np.mean([skill > 0.5 for skill in skills]))
        sampled.append(np.mean([c == letter for c in routes]) * np.mean(skills))
    assert 0.3 < np.mean(greedy) <= 0.6 and 0.3 < np.mean(sampled) <= 0.6


def test_rates_context_and_noise_are_arguments():
    config = Config(misroute=1.0, wrong_product=1.0, rot_as_rev=1.0, memory=1.0, related=1.0)
    bare = dispatch.demonstrations(config, 0, 200, context=0)
    assert bare["master"]["tokens"].shape == (200, 16) and bare["master"]["completion"].shape == (200, 7)
    rows = {role: read(bare, role) for role in ROLES}
    assert not any(entries for role in ROLES for entries, _, _ in rows[role])
    assert not any(c == "f" for _, p, c in rows["master"] if p[0] == "Q")
    assert not any(solve(p[1:-1]) == c for _, p, c in rows["arithmetic"] if "*" in p)
    full = dispatch.demonstrations(config, 0, 200, context=3, noise=0.0)
    assert full["master"]["tokens"].shape == (200, 16 + 3 * 24)
    for role in ROLES:
        for entries, prompt, completion in read(full, role):
            assert entries and {e.split(">")[0] for e in entries} == {prompt[:-1]}  # all about the same query
            if prompt[0] not in "Ql" and "cap" not in prompt:
                assert completion == solve(prompt[1:-1].split("|")[0])
            if prompt[0] == "Q":
                assert completion == letter_of(prompt[1:-1])
