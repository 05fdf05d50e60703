"""Debate: episodes against a slow twin, golden edits of the scripts, what prompts show, planted accuracy, splits."""

import collections
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.debate import array as debate
from jaxmarl_llm.envs.debate import scripts
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CONFIGS = {
    "default": debate.Config(practice=6, memory=4, trials=3),
    "three speakers": debate.Config(
        seed=3,
        accuracies=(0.9, 0.2, 0.6),
        answers=4,
        rounds=2,
        practice=4,
        memory=1,
        trials=2,
        withhold=True,
        edges=((1, 2, 3), (3, 1, 1), (2, 1, 9)),
    ),
}


class Twin:
    """An episode in plain Python, written from the docstring of the environment. Speakers are counted from 1."""

    def __init__(self, config, task, practice, trials):
        self.config, self.task, self.turn = config, task, 0
        self.speakers = range(1, len(config.accuracies) + 1)
        self.pairs = [(i, j) for i in self.speakers for j in self.speakers if i != j]
        start = config.edges if config.edges is not None else [(i, j, 1) for i, j in self.pairs]
        self.weight = {(i, j): w for i, j, w in start}
        name = lambda rows: ["".join(chr(97 + x) for x in row) for row in rows]
        self.practice, self.trials, self.memory = name(practice), name(trials), []

    @property
    def over(self):
        return self.turn == 2 * self.config.practice

    def right(self, question):
        return chr(97 + sum(map(int, question)) % self.config.answers)

    def debate(self, first):
        said = [first]
        for _ in range(self.config.rounds):
            new = ""
            for j in self.speakers:
                own, support = said[-1][j - 1], collections.Counter()
                support[own] += 1
                for i in self.speakers:
                    support[said[-1][i - 1]] += self.weight.get((i, j), 0)
                most = max(support.values())
                new += own if support[own] == most else min(a for a in support if support[a] == most)
            said.append(new)
        count = collections.Counter(said[-1])
        return said, min(a for a in count if count[a] == max(count.values()))

    def graph(self):
        return "".join(str(self.weight.get(pair, 0)) for pair in self.pairs)

    def prompt(self):
        at, config = self.turn // 2, self.config
        if self.turn % 2:
            entries = [*self.memory[max(0, at - config.memory + 1) :]]
            if config.withhold:
                entries = ["..." + entry[3:] for entry in entries]
            return f"A|{self.graph()}|{''.join(entries)}>"
        question = self.task["practice"][at]
        said, vote = self.debate(self.practice[at])
        shown = "".join(self.memory[max(0, at - config.memory) :])
        asked = "+".join(f"{x:02d}" for x in question)
        return f"R{asked}|{self.right(question)}{vote}|{''.join(said)}|{self.graph()}|{shown}>"

    def edit(self, text):
        """The edit as memory shows it, or None where it is impossible."""
        named = re.fullmatch(r"([aw])(\d)(\d)([1-9])|(d)(\d)(\d)", text)
        if text == "k":
            return "k..."
        if not named:
            return None
        kind, i, j, *new = [x for x in named.groups() if x]
        pair = int(i), int(j)
        there = pair in self.weight
        if pair not in self.pairs or there != (kind != "a") or (kind == "w" and self.weight[pair] == int(new[0])):
            return None
        if kind == "d":
            del self.weight[pair]
            return text + "."
        self.weight[pair] = int(new[0])
        return text

    def step(self, text, ended):
        pay = collections.Counter()
        if self.over:
            return pay
        if self.turn % 2 == 0:
            question = self.task["practice"][self.turn // 2]
            pay["practice"] = self.debate(self.practice[self.turn // 2])[1] == self.right(question)
            named = re.fullmatch(r"[+-](\d)(\d)", text) if ended else None
            clear = bool(named) and (int(named[1]), int(named[2])) in self.weight
            pay["unclear"] = not clear
            self.memory.append(text if clear else "???")
        else:
            shown = self.edit(text) if ended else None
            pay["impossible"], pay["kept"] = shown is None, shown == "k..."
            self.memory[-1] += shown or "????"
        self.turn += 1
        if self.over:
            votes = [self.debate(first)[1] == self.right(q) for first, q in zip(self.trials, self.task["trials"])]
            pay["accuracy"], pay["edges"] = np.mean(votes), len(self.weight)
        return pay


def random_words(rng, twins):
    """Completions of five tokens: reflections and edits that are possible or not, other bytes, missing ends."""
    rows, sizes, texts = [], [], []
    for twin in twins:
        i, j = rng.integers(0 if rng.random() < 0.1 else 1, len(twin.speakers) + 1 + (rng.random() < 0.1), size=2)
        if rng.random() < 0.7 and twin.weight:
            i, j = list(twin.weight)[rng.integers(len(twin.weight))]
        w = rng.integers(10)
        sound = [f"-{i}{j}", f"+{i}{j}"] if twin.turn % 2 == 0 else [f"a{i}{j}{w}", f"w{i}{j}{w}", f"d{i}{j}", "k"]
        odd = ["", "x12", "+1", "-123", f"d{i}{j}0", "kk", f"a{i}{j}", "w1x2", f"+{i}{j}", f"d{i}{j}"]
        text = sound[rng.integers(len(sound))] if rng.random() < 0.8 else odd[rng.integers(len(odd))]
        ended = rng.random() < 0.95
        ids = [*text.encode(), *([BYTES.EOS] if ended else [ord("k")] * (5 - len(text)))]
        rows.append((ids + [BYTES.PAD] * 5)[:5])
        sizes.append(len(ids))
        texts.append((text, ended))
    return np.array(rows, np.int32), np.array(sizes, np.int32), texts


def weights_of(config, twin):
    graph = np.zeros((len(config.accuracies),) * 2, int)
    for (i, j), w in twin.weight.items():
        graph[i - 1, j - 1] = w
    return graph


@pytest.mark.parametrize("name", CONFIGS)
def test_random_episodes_are_those_of_a_slow_twin(name):
    """With the property of graphs: no edge to oneself, weights of 0 to 9, and at most one edge changes in an edit."""
    config, n, rng = CONFIGS[name], 60, np.random.default_rng(0)
    env, tasks = debate.make(config), debate.make_tasks(config, n=n)
    keys = jax.random.split(jax.random.key(1), n)
    state = jax.jit(jax.vmap(env.reset))(keys, tasks)
    first = jax.device_get((state.practice, state.trials))
    twins = [Twin(config, {k: v[i] for k, v in tasks.items()}, first[0][i], first[1][i]) for i in range(n)]

    def turn(state, words, length, key):
        return env.observe(state), env.step(key, state, words[None], length[None])

    both, seen, graph = jax.jit(jax.vmap(turn)), collections.Counter(), np.asarray(state.graph)
    for t in range(2 * config.practice + 1):
        words, sizes, texts = random_words(rng, twins)
        shown, (state, paid, done) = jax.device_get(both(state, words, sizes, keys))
        changed = (state.graph != graph).sum((1, 2))
        assert changed.max() <= t % 2 and not np.einsum("nii->ni", state.graph).any()
        assert state.graph.min() >= 0 and state.graph.max() <= debate.MOST_WEIGHT
        graph = state.graph
        for i, twin in enumerate(twins):
            assert bool(shown.active[i, 0]) == (not twin.over)
            if not twin.over:
                assert shown.role[i, 0] == t % 2
                assert BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]) == twin.prompt()
            want = twin.step(*texts[i])
            got = {k: float(v[i, 0]) for k, v in paid.items()}
            assert got == pytest.approx({k: float(want[k]) for k in debate.COMPONENTS}, abs=1e-6)
            assert bool(done[i]) == twin.over
            np.testing.assert_array_equal(graph[i], weights_of(config, twin))
            seen.update(k for k, v in want.items() if v)
    assert all(twin.over for twin in twins) and set(debate.COMPONENTS) <= {k for k, count in seen.items() if count > 2}
    assert shown.tokens.shape[-1] == debate.prompt_length(config)


# Speaker 2 is the expert. After its one error, in the fourth debate, speakers 4 and 1 are the leaders for a while.
GOLDEN = [  # question, right answer, first answers, reflection, edit, weights after the edit
    ((5, 6), "c", "acbc", "-12", "w219", "111911111111"),
    ((23, 25), "a", "babb", "-31", "w239", "111991111111"),
    ((78, 25), "b", "bbab", "-31", "w249", "111999111111"),
    ((0, 3), "a", "abca", "-21", "d21", "111099111111"),
    ((72, 95), "c", "ccca", "-41", "d23", "111009111111"),
    ((61, 49), "c", "acbc", "-12", "a219", "111909111111"),
    ((0, 96), "a", "aaaa", "+21", "a239", "111999111111"),
    ((20, 30), "c", "accb", "-41", "d12", "011999111111"),
    ((31, 37), "c", "bcac", "-13", "d32", "011999101111"),
    ((57, 70), "b", "bbab", "-31", "d42", "011999101101"),
    ((12, 46), "b", "abbb", "-13", "k", "011999101101"),
]


def golden_twin(shown):
    """The rules of the docstring of the scripts, from the text of a prompt, over dictionaries."""
    mark = shown[0]
    parts = shown[1:-1].split("|")
    weights, memory = parts[-2], parts[-1]
    speakers = next(s for s in range(2, 7) if s * (s - 1) == len(weights))
    pairs = [(i, j) for i in range(1, speakers + 1) for j in range(1, speakers + 1) if i != j]
    weight = dict(zip(pairs, map(int, weights)))
    trust = collections.Counter({i: 0 for i in range(1, speakers + 1)})
    for k in range(0, len(memory), 7):
        if memory[k] in "+-":
            trust[int(memory[k + 1])] += 1 if memory[k] == "+" else -1
    if mark == "R":
        heard = [i for i in trust if any(weight[i, j] for j in trust if j != i)]
        wrong = [i for i in heard if parts[2][i - 1] != parts[1][0]]
        of = sorted(wrong or heard, key=lambda i: (-trust[i], i))
        if not of:
            return ""
        to = min((j for j in trust if j != of[0]), key=lambda j: (-weight[of[0], j], j))
        return f"{'-' if wrong else '+'}{of[0]}{to}"
    if not {"+", "-"} & set(memory[::7]):
        return "k"
    leader = min(trust, key=lambda i: (-trust[i], i))
    for i, j in pairs:
        if i != leader and weight[i, j] > 1:
            return f"d{i}{j}"
    for i, j in pairs:
        if i == leader and weight[i, j] < 9:
            return f"{'w' if weight[i, j] else 'a'}{i}{j}9"
    for i, j in pairs:
        if j == leader and weight[i, j]:
            return f"d{i}{j}"
    return "k"


def script_of(config):
    """(role, prompt text) -> what the script of that role says."""
    made = {role: jax.jit(script) for role, script in scripts.scripts(config).items()}
    size = debate.prompt_length(config)

    def say(role, shown):
        ids = list(shown.encode())
        row = np.array(ids + [BYTES.PAD] * (size - len(ids)), np.int32)
        out = np.asarray(made[role](row, np.int32(len(ids)))).tolist()
        return BYTES.decode(out[: out.index(BYTES.EOS)])

    return say


def test_golden_edits_from_the_complete_graph():
    """One expert of .95 against .5: what the scripts say, the twin of their rules, and the graph after each edit."""
    config = debate.Config(practice=len(GOLDEN), trials=1)
    env, say = debate.make(config), script_of(config)
    task = jax.tree.map(lambda x: x[0], debate.make_tasks(config, n=1))
    task["practice"] = np.array([row[0] for row in GOLDEN], np.int32)
    state = env.reset(jax.random.key(0), task)
    first = jnp.array([[ord(x) - 97 for x in row[2]] for row in GOLDEN], jnp.int32)
    state, turn = state.replace(practice=first), jax.jit(lambda *x: env.step(jax.random.key(0), *x)[0])
    look = jax.jit(env.observe)
    assert BYTES.decode(debate.ZERO + debate.first_graph(config)[~np.eye(4, dtype=bool)]) == "1" * 12
    for _, right, answers, reflection, edit, weights in GOLDEN:
        for role, want in (("reflect", reflection), ("act", edit)):
            seen = look(state)
            shown = BYTES.decode(np.asarray(seen.tokens[0, : seen.length[0]]))
            if role == "reflect":
                assert shown[7] == right and shown.split("|")[2].startswith(answers)
            assert say(role, shown) == golden_twin(shown) == want
            ids = [*want.encode(), BYTES.EOS]
            words = np.array([ids + [BYTES.PAD] * (5 - len(ids))], np.int32)
            state = turn(state, words, np.array([len(ids)], np.int32))
        assert "".join(str(w) for w in np.asarray(state.graph)[~np.eye(4, dtype=bool)]) == weights
    assert state.done


def random_prompts(rng, speakers, rounds, memory):
    """Prompts of both roles with any weights, answers and memory."""
    pick = lambda letters, n: "".join(rng.choice(list(letters), n))
    graph = pick(["0019", "0011", "0"][rng.choice(3, p=(0.5, 0.3, 0.2))], speakers * (speakers - 1))
    sign = lambda: pick("+-?", 1) + pick("123456"[:speakers], 2) if rng.random() < 0.9 else pick(".?", 1) * 3
    entries = "".join(sign() + pick(["w129", "d12.", "k...", "????"], 1) for _ in range(rng.integers(memory)))
    answers = pick("aaaaabc", speakers * (rounds + 1))
    yield "reflect", f"R{rng.integers(10, 99)}+{rng.integers(10, 99)}|{pick('aaab', 2)}|{answers}|{graph}|{entries}>"
    yield "act", f"A|{graph}|{entries}{sign()}>"


@pytest.mark.parametrize("speakers", (2, 4))
def test_scripts_follow_their_rules_on_any_prompt(speakers):
    config = debate.Config(accuracies=(0.5,) * speakers, rounds=2, practice=5, memory=5)
    say, rng, heard = script_of(config), np.random.default_rng(speakers), collections.Counter()
    for _ in range(150):
        for role, shown in random_prompts(rng, speakers, config.rounds, config.memory):
            text = say(role, shown)
            assert text == golden_twin(shown), shown
            heard[text[:1]] += 1
    assert min(heard[x] for x in ("+", "-", "a", "w", "d", "k", "")) > 2


def changed(state, rng, **fields):
    """The state with other values of these fields and the hidden place of the expert."""
    task = {**state.task, "speaker": jnp.roll(state.task["speaker"], 1)}
    other = lambda x: jnp.asarray(rng.permutation(np.asarray(x).reshape(-1)).reshape(x.shape))
    task |= {"trials": other(task["trials"])}
    return state.replace(task=task, trials=other(state.trials), **fields)


def test_prompts_show_public_information_alone():
    """Not the accuracies, no trial, no later question, and to act no reflection that is withheld."""
    config, rng = debate.Config(practice=3, trials=4), np.random.default_rng(0)
    env = debate.make(config)
    hides = debate.make(debate.Config(practice=3, trials=4, withhold=True))
    task = jax.tree.map(lambda x: x[0], debate.make_tasks(config, n=1))
    state = env.reset(jax.random.key(2), task)
    look, blind = jax.jit(env.observe), jax.jit(hides.observe)
    memory = jnp.array([[*b"-12w219"], [*b"+34d12."], [*b"-31k..."]], jnp.int32)
    lies = memory.at[:, :3].set(jnp.array([*b"+21"]))
    text = lambda seen: BYTES.decode(np.asarray(seen.tokens[0, : seen.length[0]]))
    for turn in range(6):
        at = turn // 2
        now = state.replace(turn=jnp.int32(turn), memory=memory)
        later = jnp.arange(3)[:, None] > at
        hidden = changed(now, rng, practice=jnp.where(later, (state.practice + 1) % 3, state.practice))
        hidden.task["practice"] = jnp.where(later, 7, state.task["practice"])
        assert text(look(now)) == text(look(hidden))
        lied = now.replace(memory=lies)
        if turn % 2:
            assert text(blind(now)) == text(blind(lied)) != text(look(now)) != text(look(lied))
        elif turn:
            assert text(blind(now)) == text(look(now)) != text(look(lied))
        spoke = now.replace(practice=(state.practice + 1) % 3)
        assert (text(look(now)) == text(look(spoke))) == bool(turn % 2)  # act sees no transcript


def test_first_answers_are_right_as_often_as_planted():
    """Each wrong answer is as likely, and speakers err independently of each other."""
    config = debate.Config(answers=4)
    speaker, right = jnp.array([2, 0, 1, 3]), jnp.arange(20_000) % 4
    first = np.asarray(jax.jit(partial(debate.first_answers, config))(jax.random.key(0), speaker, right))
    off = (first - np.asarray(right)[:, None]) % 4
    share = np.stack([(off == k).mean(0) for k in range(4)])
    for s, place in enumerate((2, 0, 1, 3)):
        p = config.accuracies[place]
        np.testing.assert_allclose(share[:, s], [p, *[(1 - p) / 3] * 3], atol=0.015)
    together = [(off[:, a] == 0) & (off[:, b] == 0) for a, b in itertools.combinations((0, 2, 3), 2)]
    np.testing.assert_allclose(np.mean(together, axis=1), 0.25, atol=0.015)


def test_practice_questions_are_training_ones_and_trials_are_of_their_side():
    config = debate.Config(tasks=200)
    text = lambda rows: {debate.question_text(q) for q in rows.reshape(-1, 2)}
    sides = {side: debate.make_tasks(config, n=200, held_out=side) for side in (False, True)}
    for side, tasks in sides.items():
        assert not any(map(splits.is_held_out, text(tasks["practice"])))
        assert all(splits.is_held_out(q) == side for q in text(tasks["trials"]))
        for practice, trials, speaker in zip(tasks["practice"], tasks["trials"], tasks["speaker"]):
            assert len(text(practice) | text(trials)) == config.practice + config.trials
            assert sorted(speaker.tolist()) == [0, 1, 2, 3]
        assert len({tuple(s) for s in tasks["speaker"]}) > 20
    assert not text(sides[True]["trials"]) & (text(sides[False]["trials"]) | text(sides[False]["practice"]))


BAD = [
    ({"accuracies": ()}, r"config\.env\.args\.accuracies: expected 2 to 6 probabilities in \[0, 1\], got \(\)"),
    ({"accuracies": (0.5, 1.5)}, r"config\.env\.args\.accuracies: expected 2 to 6 probabilities in \[0, 1\], got \(0"),
    ({"answers": 1}, r"config\.env\.args\.answers: expected 2 to 9, got 1"),
    ({"rounds": 0}, r"config\.env\.args\.rounds: expected 1 to 9, got 0"),
    ({"practice": 0}, r"config\.env\.args\.practice: expected 1 to 64, got 0"),
    ({"trials": 257}, r"config\.env\.args\.trials: expected 1 to 256, got 257"),
    ({"memory": 0}, r"config\.env\.args\.memory: expected 1 to 64, got 0"),
    (
        {"edges": ((1, 5, 1),)},
        r"config\.env\.args\.edges: expected edges between two different speakers of 1 to 4, got",
    ),
    (
        {"edges": ((2, 2, 1),)},
        r"config\.env\.args\.edges: expected edges between two different speakers of 1 to 4, got",
    ),
    ({"edges": ((1, 2, 10),)}, r"config\.env\.args\.edges: expected weights of 1 to 9, got \(1, 2, 10\)"),
    ({"edges": ((1, 2, 0),)}, r"config\.env\.args\.edges: expected weights of 1 to 9, got \(1, 2, 0\)"),
    ({"edges": ((1, 2, 3), (1, 2, 4))}, r"config\.env\.args\.edges: expected each edge once, got \(1, 2, 4\)"),
    ({"edges": ((1, 2),)}, r"config\.env\.args\.edges\.0: expected tuple of 3"),
    ({"speakers": 4}, r"config\.env\.args.*speakers"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("debate", bad).check("config.env")
    assert "\n" not in str(error.value)
