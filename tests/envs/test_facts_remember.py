"""The protocol `remember` of facts: episodes against a slow twin, streams, teams, demonstrations, bad input."""

import collections

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import remember, stream, tasks
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.envs import facts_episodes
from tests.envs.facts_episodes import encode, program

BYTES = ByteTokenizer()
R = remember.RESPONSE + 2
N = 96


def config(**changes):
    own = {name: changes.pop(name) for name in [*changes] if name in remember.Settings.__dataclass_fields__}
    return facts.Config(protocol="remember", remember=remember.Settings(**own), **changes)


CONFIG = config()
CONFIGS = {
    "two pieces": CONFIG,
    "four pieces": config(pieces=4, outdated=4, chatter=0, entities=4, relations=3),
    "one piece": config(pieces=1, outdated=1, chatter=5, two_hops=1.0, seed=3),
}


def texts_of(rows):
    """Tasks as text, and their streams."""
    streams = [[bytes(statement.tolist()).decode() for statement in stream] for stream in rows["stream"]]
    return list(zip(facts_episodes.texts_of(rows), streams, strict=True))


# -- a slow twin, written from the docstrings --------------------------------------------------------------------------


def twin_overlaps(gold, hits, number):
    """Recall, and intersection over union."""
    both = len([statement for statement in gold if statement in hits])
    return both / len(gold), both / (number + len(gold) - both)


def twin_profile(store):
    """The facts of a store that no later one replaces, one after the other."""
    values = {}
    for statement in store:
        if statement[1] in "0123456789":
            values[statement[0] + statement[1]] = statement[2]
    return {key + value for key, value in values.items()}


def twin_walk(question, quotes):
    """The entity at the end of the question, "" where none is."""
    place = question[0]
    for relation in question[1:]:
        leads = [quote[2] for quote in quotes if place and quote[:2] == place + relation]
        place = leads[0] if leads else ""
    return place


class Twin:
    """An episode in plain Python. Completions are texts, with whether they have an eos."""

    def __init__(self, task, said, settings):
        self.task, self.stream, self.pieces, self.turn = task, said, settings.pieces, 0
        self.kept, self.quotes, self.profile = [], 0, []
        self.done = False

    def role(self):
        return ["extractor"] * self.pieces + ["profiler", "retriever"]

    def shown(self):
        size = len(self.stream) // self.pieces
        if self.turn < self.pieces:
            return self.stream[self.turn * size : (self.turn + 1) * size]
        chosen = self.kept if self.turn == self.pieces else self.profile
        return [statement for statement in self.stream if statement in chosen]

    def prompt(self):
        mark = {"extractor": "E", "profiler": "P", "retriever": "F"}[self.role()[self.turn]]
        asked = f"|{self.task.question}" if mark == "F" else ""
        return f"{mark}{''.join(self.shown())}{asked}>"

    def act(self, said, ended):
        """Rewards of the role that acts, with those of all."""
        pay = dict.fromkeys(remember.COMPONENTS, 0.0) | {"turns": 1.0}
        role, shown = self.role()[self.turn], self.shown()
        parts = [said[i : i + 3] for i in range(0, len(said), 3)]
        quotes = [part if ended and part in shown else None for part in parts[:8]]
        good = [part for part in quotes if part]
        pay["format"] = float(ended and sorted(parts) == sorted(set(good)))
        if role == "extractor":
            self.kept += good
            self.quotes += len(parts)
            if self.turn == self.pieces - 1:
                gold = [statement for statement in self.stream if statement[1].isdigit()]
                pay["kept_recall"], pay["kept_overlap"] = twin_overlaps(gold, self.kept, self.quotes)
        elif role == "profiler":
            self.profile = good
            pay["profile"] = float(ended and len(parts) == len(set(parts)) and set(parts) == twin_profile(shown))
        else:
            pay["found_recall"], pay["found_overlap"] = twin_overlaps(self.task.path, good, len(parts))
            pay["answer"] = float(twin_walk(self.task.question, good) == self.task.answer)
            self.done = True
        self.turn += 1
        return pay


# -- whole episodes ----------------------------------------------------------------------------------------------------


def play(cfg, rows, speak):
    """Turns of episodes: what is seen, prompts, rewards, ends. ``speak(turn, prompts)`` -> completions."""
    begin, observe, step = program(cfg)
    state = begin(rows)
    for turn in range(cfg.remember.pieces + 3):
        seen = jax.device_get(observe(state))
        prompts = [BYTES.decode(ids[0, : n[0]]) for ids, n in zip(seen.tokens, seen.length)]
        state, pay, done = step(state, *encode(speak(turn, prompts), R))
        yield seen, prompts, *jax.device_get((pay, done))


def shown_in(prompt):
    """The statements of a prompt."""
    text = prompt[1:].split("|")[0].rstrip(">")
    return [text[i : i + 3] for i in range(0, len(text), 3)]


def some_quotes(rng, prompt, path, every, right):
    """Quotes that the role of ``prompt`` may well write: right ones, and such with omissions, repeats and noise."""
    shown = shown_in(prompt)
    if prompt[0] == "F" and rng.random() < 0.5:
        shown = [statement for statement in path if statement in shown]
    quotes = [statement for statement in shown if rng.random() < 0.85]
    if rng.random() < 0.6:
        quotes = right
    rng.shuffle(quotes)
    if quotes and rng.random() < 0.15:
        quotes.append(quotes[rng.integers(len(quotes))])
    if rng.random() < 0.15:  # a statement that the prompt may not show
        quotes.append(every[rng.integers(len(every))])
    text = "".join(quotes)
    if rng.random() < 0.2:
        at = rng.integers(len(text) + 1)
        text = text[:at] + "".join(rng.choice(list("ab1?>"), rng.integers(1, 4))) + text[at:]
    text = text[:R]
    return text, bool(len(text) < R and rng.random() < 0.9)


def right_quotes(prompt, task):
    """What a perfect role writes."""
    shown = shown_in(prompt)
    if prompt[0] == "F":
        return [statement for statement in task.path if statement in shown]
    found = twin_profile(shown) if prompt[0] == "P" else [statement for statement in shown if statement[1].isdigit()]
    return [statement for statement in shown if statement in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_episodes_of_random_completions_are_those_of_a_slow_twin(name):
    """Prompts, who acts, every reward and the end, whatever is written."""
    cfg, rng, seen, said = CONFIGS[name], np.random.default_rng(0), collections.Counter(), {}
    rows = facts.make_tasks(cfg, n=N)
    twins = [Twin(task, told, cfg.remember) for task, told in texts_of(rows)]

    def speak(turn, prompts):
        said[turn] = [
            some_quotes(rng, p, t.task.path, t.stream, right_quotes(p, t.task)) for p, t in zip(prompts, twins)
        ]
        return said[turn]

    for turn, (shown, prompts, pay, done) in enumerate(play(cfg, rows, speak)):
        for i, twin in enumerate(twins):
            got = {key: value[i] for key, value in pay.items()}
            assert bool(shown.active[i, 0]) != twin.done
            if twin.done:
                assert done[i] and not any(value.any() for value in got.values())
                continue
            role = remember.ROLES.index(twin.role()[turn])
            assert int(shown.role[i, 0]) == role and facts.make(cfg).actors[turn] == (role,)
            assert prompts[i] == twin.prompt() and len(prompts[i]) <= remember.prompt_lengths(cfg.remember)[role]
            want = twin.act(*said[turn][i])
            own = np.arange(3) == role
            off = {k for k in got if not np.allclose(got[k], want[k] * (own | (k == "answer")), atol=1e-6)}
            assert not off, (off, prompts[i], said[turn][i], got, want)
            assert bool(done[i]) == twin.done == (turn == cfg.remember.pieces + 1)
            seen.update((role, key, value == 1) for key, value in want.items() if value)
    paid = collections.Counter(key for _, key, _ in seen.elements())
    assert set(paid) == set(remember.COMPONENTS)
    for role, key in (0, "kept_recall"), (0, "kept_overlap"), (2, "found_recall"), (2, "found_overlap"):
        assert seen[role, key, True] and (seen[role, key, False] > 3 or key == "found_recall"), (key, seen)
    assert 5 < paid["profile"] < N - 5 and 5 < paid["answer"] < N - 5


def test_the_first_of_several_facts_is_the_answer():
    """All statements quoted in random orders, outdated ones too: read off as `stream.walk` and the twin do."""
    rng, rows = np.random.default_rng(0), facts.make_tasks(CONFIG, n=200)
    places = np.stack([rng.permutation(stream.STATEMENTS) for _ in range(200)])
    got = jax.device_get(jax.jit(jax.vmap(remember.read_off))(rows, places))
    seen = collections.Counter()
    for (task, said), order, letter in zip(texts_of(rows), places, got, strict=True):
        quotes = [said[place] for place in order]
        walked = stream.walk(task.question, quotes)
        assert walked == (chr(letter) if letter >= 0 else "") == twin_walk(task.question, quotes)
        seen[walked == task.answer, walked == ""] += 1
    assert len(seen) == 3 and min(seen.values()) > 5, seen


def test_a_completion_that_fills_its_room_is_read_as_far_as_it_goes():
    """Nine quotes, of which eight are read; without eos nothing is quoted. R below the room changes nothing."""
    said = np.array([[*word.encode()] for word in ("a1b", "a2b", "a3b", "a4b", "a5b", "b1a", "b2a", "b3a")], np.int32)
    every = np.ones(8, bool)

    def read(text, ended, room):
        ids = ([*text.encode()] + [BYTES.EOS] * ended)[:room]
        row = np.array(ids + [BYTES.PAD] * (room - len(ids)), np.int32)
        return remember.read_quotes(said, every, row, np.int32(len(ids)))

    whole = "a1ba2ba3ba4ba5bb1ab2ab3a"
    assert read(whole, True, 25).proper and not read(whole, False, 24).quoted.any()
    nine = read(whole + "a1b", True, 30)
    assert (int(nine.number), bool(nine.proper), int(nine.quoted.sum())) == (9, False, 8)
    short = read("a2bb1", True, 7)
    assert (int(short.number), bool(short.proper), short.places.tolist()) == (2, False, [1] + [-1] * 7)
    assert read("", True, 7).proper and not read("", False, 7).proper


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_streams(name):
    """Their numbers of statements; the path is current; an outdated fact is replaced later, by another entity."""
    cfg = CONFIGS[name]
    own, first = cfg.remember, collections.Counter()
    for task, said in texts_of(facts.make_tasks(cfg, n=200)):
        assert len(said) == len(set(said)) == stream.STATEMENTS
        current = [statement for statement in said if statement in task.facts]
        chatter = [statement for statement in said if not statement[1].isdigit()]
        old = [statement for statement in said if statement not in current + chatter]
        assert (len(old), len(chatter)) == (own.outdated, own.chatter) and set(task.path) <= set(current)
        assert all(letter in tasks.LETTERS for statement in chatter for letter in statement)
        for statement in old:
            later = [other for other in said[said.index(statement) + 1 :] if other[:2] == statement[:2]]
            assert len(later) == 1 and later[0] in current and statement[0] != statement[2]
        assert twin_profile(said) == set(current) == set(stream.latest(said))
        assert stream.walk(task.question, current) == task.answer
        first[said[0] in old, said[0] in chatter] += 1
    unreplaced = stream.STATEMENTS - own.chatter > 2 * own.outdated
    assert len(first) == (own.outdated > 0) + (own.chatter > 0) + unreplaced  # each kind may come first


def test_the_path_is_outdated_as_often_as_other_facts():
    """With two of four current facts replaced, half of the paths' facts are."""
    of_path = []
    for task, said in texts_of(facts.make_tasks(CONFIG, n=400)):
        of_path += [any(s[:2] == fact[:2] and s != fact for s in said) for fact in task.path]
    assert abs(np.mean(of_path) - 0.5) < 0.08


def test_held_out_tasks_are_new():
    told = lambda rows: [(task.question, frozenset(task.facts)) for task, _ in texts_of(rows)]
    rows, other = facts.make_tasks(CONFIG, n=200), facts.make_tasks(CONFIG, n=200, held_out=True)
    assert not set(told(rows)) & set(told(other))
    for task, _ in texts_of(other):
        assert splits.is_held_out(tasks.content(task))
    again = facts.make_tasks(CONFIG, n=200)
    assert all(np.array_equal(rows[name], again[name]) for name in rows)
    assert (facts.make_tasks(CONFIG, seed=1, n=200)["stream"] != rows["stream"]).any()


# -- teams -------------------------------------------------------------------------------------------------------------


def earned(cfg, **policies):
    """Mean rewards of held-out episodes; roles without a policy are perfect. A policy is (prompt, task) -> quotes."""
    rows = facts.make_tasks(cfg, n=N, held_out=True)
    known, sums = [task for task, _ in texts_of(rows)], collections.Counter()
    of = {mark: policies.get(role, right_quotes) for mark, role in zip(remember.MARKS, remember.ROLES)}
    speak = lambda turn, prompts: [("".join(of[p[0]](p, task)), True) for p, task in zip(prompts, known)]
    for _, _, pay, _ in play(cfg, rows, speak):
        for key, value in pay.items():
            sums[key] += float(value.max(1).mean())
    return sums


@pytest.mark.parametrize("name", CONFIGS)
def test_a_perfect_team_earns_every_reward(name):
    sums = earned(CONFIGS[name])
    paid = ("answer", "kept_recall", "kept_overlap", "profile", "found_recall", "found_overlap")
    assert {key: sums[key] for key in paid} == pytest.approx(dict.fromkeys(paid, 1.0))
    assert sums["format"] == sums["turns"] == CONFIGS[name].remember.pieces + 2


everything, nothing = (lambda prompt, task: shown_in(prompt)), (lambda prompt, task: [])


def test_each_role_matters_for_the_answer():
    """A role that writes nothing leaves no answer. Outdated facts and chatter in the way cost answers or rewards."""
    for role in remember.ROLES:
        assert earned(CONFIG, **{role: nothing})["answer"] == 0
    hoards = earned(CONFIG, extractor=everything)
    assert (hoards["kept_recall"], hoards["kept_overlap"], hoards["answer"]) == pytest.approx((1, 6 / 8, 1))
    copies = earned(CONFIG, profiler=everything, retriever=everything)
    assert copies["profile"] == 0 and copies["found_recall"] == 1
    assert copies["answer"] < 0.6 and copies["found_overlap"] < 0.4
    idle = earned(CONFIG, extractor=nothing)
    assert (idle["profile"], idle["found_recall"], idle["kept_overlap"]) == (1, 0, 0)


def test_golden_rewards():
    """Extractor: 4 of 5 facts and one statement too many. Retriever: the path and an entry too many."""
    gold, quoted = np.array([1, 1, 1, 1, 1, 0, 0, 0], bool), np.array([1, 1, 1, 1, 0, 1, 0, 0], bool)
    assert [float(x) for x in remember.overlaps(gold, quoted, np.int32(5))] == pytest.approx([0.8, 4 / 6])
    assert [float(x) for x in remember.overlaps(gold, quoted, np.int32(7))] == pytest.approx([0.8, 4 / 8])
    path = np.array([1, 1, 0, 0, 0, 0, 0, 0], bool)
    extra = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)
    assert [float(x) for x in remember.overlaps(path, extra, np.int32(3))] == pytest.approx([1, 2 / 3])


# -- demonstrations ----------------------------------------------------------------------------------------------------


PERFECT = dict.fromkeys(("miss_rate", "chatter_rate", "outdated_rate", "hop_error_rate", "extra_rate"), 0.0)


def demonstrated(cfg, n):
    """Pairs of prompt and completion by role; a completion has an eos at its end."""
    out = {}
    for role, columns in facts.demonstrations(cfg, 0, n).items():
        text = lambda ids, size: BYTES.decode(ids[:size])
        rows = zip(*(columns[k] for k in ("tokens", "length", "completion", "completion_length")))
        pairs = []
        for tokens, length, completion, size in rows:
            assert completion[size - 1] == BYTES.EOS
            pairs.append((text(tokens, length), text(completion, size - 1)))
        out[role] = pairs
    return out


def test_perfect_demonstrations_are_what_a_perfect_team_writes():
    shown = demonstrated(config(copying=0.0, **PERFECT), 100)
    for prompt, said in [*shown["extractor"], *shown["profiler"]]:
        assert said == "".join(right_quotes(prompt, None))
    for prompt, said in shown["retriever"]:
        asked, quotes = prompt.split("|")[1].rstrip(">"), [said[i : i + 3] for i in range(0, len(said), 3)]
        assert len(quotes) == len(asked) - 1 and set(quotes) <= set(shown_in(prompt))
        assert stream.walk(asked, quotes) == stream.walk(asked, shown_in(prompt)) != ""


def mistakes(pairs):
    """Shares of mistakes: right statements that are missing, and others that are quoted, among those of the prompts."""
    missing, extra = [], []
    for prompt, said in pairs:
        quotes, right = shown_in("." + said), right_quotes(prompt, None)
        missing += [statement not in quotes for statement in right]
        extra += [statement in quotes for statement in shown_in(prompt) if statement not in right]
    return np.mean(missing), np.mean(extra)


def retriever_mistakes(pairs):
    """Shares of questions of two hops without an answer, and of retrievals with an entry that is not on the path."""
    short, extra = [], []
    for prompt, said in pairs:
        asked, quotes = prompt.split("|")[1].rstrip(">"), shown_in("." + said)
        short += [stream.walk(asked, quotes) == ""] * (len(asked) == 3)
        extra.append(len(quotes) > len(asked) - 1 or (len(quotes) == 2 and stream.walk(asked, quotes) == ""))
    return np.mean(short), np.mean(extra)


PLANTED = {
    "miss_rate": ("extractor", (0.5, 0)),
    "chatter_rate": ("extractor", (0, 0.5)),
    "outdated_rate": ("profiler", (0, 0.5)),
    "hop_error_rate": ("retriever", (0.5, 0)),
    "extra_rate": ("retriever", (0, 0.5)),
}


@pytest.mark.parametrize("rate", PLANTED)
def test_each_rate_plants_mistakes_of_its_role_alone(rate):
    shown = demonstrated(config(copying=0.0, **{**PERFECT, rate: 0.5}), 250)
    planted, want = PLANTED[rate]
    for role in remember.ROLES:
        if role == "retriever" and rate == "miss_rate":
            continue  # facts of the path may be missing in its prompt
        share = (retriever_mistakes if role == "retriever" else mistakes)(shown[role])
        for got, wanted in zip(share, want if role == planted else (0, 0), strict=True):
            assert abs(got - wanted) < (0.1 if wanted else 1e-9), (role, share)


def test_demonstrations_with_exercises_fit_their_rows():
    cfg = config(copying=0.75)
    samples = facts.demonstrations(cfg, 0, 200)
    own = [(samples[role]["tokens"][:, 0] == ord(mark)).mean() for role, mark in zip(remember.ROLES, remember.MARKS)]
    np.testing.assert_allclose(own, 0.25, atol=0.1)
    assert max(columns["length"].max() for columns in samples.values()) <= remember.prompt_length(cfg.remember) == 30


# -- settings ----------------------------------------------------------------------------------------------------------


BAD = [
    ({"pieces": 8}, r"^config\.env\.args\.remember\.pieces: unknown value 8; choose from 1, 2, 4$"),
    ({"outdated": 5}, r"^config\.env\.args\.remember\.outdated: expected 0 to 4, got 5$"),
    ({"chatter": 5}, r"^config\.env\.args\.remember\.chatter: expected 0 to 4, got 5$"),
    ({"outdated": 4, "chatter": 1}, r"^config\.env\.args\.remember\.chatter: expected 0 to 0, got 1$"),
    ({"outdated": 0, "chatter": 7}, r"^config\.env\.args\.remember\.chatter: expected 0 to 6, got 7$"),
    ({"extra_rate": 1.5}, r"^config\.env\.args\.remember\.extra_rate: expected a probability in \[0, 1\], got 1\.5$"),
]


@pytest.mark.parametrize("settings, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("facts", {"protocol": "remember", "remember": settings}).check("config.env")
    assert "\n" not in str(error.value)
