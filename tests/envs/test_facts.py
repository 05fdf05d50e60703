"""Facts: search and whole episodes against slow twins, perfect and degenerate teams, demonstrations, bad input."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import pipeline, search, tasks
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.envs import facts_episodes
from tests.envs.facts_episodes import encode, program

BYTES = ByteTokenizer()
CONFIG = facts.Config()
SETTINGS = CONFIG.pipeline
R = pipeline.RESPONSE
N = 128


def texts_of(rows):
    """Tasks as text, and their noise."""
    return list(zip(facts_episodes.texts_of(rows), rows["noise"], strict=True))


# -- slow twins, written from the docstrings ---------------------------------------------------------------------------


def twin_search(every, queries):
    """Results of queries, one character after the other."""
    results, last = [], None
    for query in queries:
        found = []
        good = len(query) in (1, 2) and all(c in "abcdefghijklmnopqrstuvwxyz0123456789*" for c in query)
        for fact in every if good else ():
            wanted = last if query[0] == "*" else query[0]
            if wanted is not None and fact[0] == wanted and (len(query) == 1 or fact[1] == query[1]) and len(found) < 3:
                found.append(fact)
        last = found[0][2] if found else None
        results.append(found)
    return results


def twin_f1(said, gold):
    """F1 as of words: harmonic mean of precision and recall of the bag of characters."""
    common = sum((collections.Counter(said) & collections.Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(gold)
    return 2 * precision * recall / (precision + recall)


class Twin:
    """An episode in plain Python. Completions are texts, with whether they have an eos."""

    def __init__(self, task, noise, settings):
        self.task, self.noise, self.settings = task, noise, settings
        self.documents, self.kept, self.turn = [], [], 0

    def prompt(self):
        asked = self.task.question
        return [f"Q{asked}>", f"S{''.join(self.documents)}|{asked}>", f"G{''.join(self.kept)}|{asked}>"][self.turn]

    def rewrite(self, said):
        queries = said.split(",")
        found = []
        for results in twin_search(self.task.facts, queries[:4]):
            found += [fact for fact in results if fact not in found]
        shown = set(found[: self.settings.documents - self.settings.distractors])
        if found:
            others = [self.task.facts[i] for i in self.noise if self.task.facts[i] not in found]
            shown |= set(others[: self.settings.distractors])
        self.documents = [fact for fact in self.task.facts if fact in shown]
        return len(queries) <= 4 and len(said) <= 11 and all(re.fullmatch(r"[a-z0-9*]{1,2}", q) for q in queries)

    def select(self, said, ended):
        if not ended or not said:
            return ended
        quotes = said.split(",")
        known = [q for q in quotes if q in self.documents]
        self.kept = list(dict.fromkeys(known))[: self.settings.kept]
        return len(known) == len(quotes) == len(set(quotes))

    def act(self, said, ended):
        """The rewards of a turn of the role that acts, and those of all."""
        role, pay = self.turn, dict.fromkeys(pipeline.COMPONENTS, 0.0)
        if role == 0:
            proper = self.rewrite(said) and ended
        elif role == 1:
            proper = self.select(said, ended)
        else:
            proper = ended and len(said) <= self.settings.answer_length
            pay["f1"], pay["em"] = twin_f1(said, self.task.answer), float(ended and said == self.task.answer)
        have = [self.documents, self.kept, []][role]
        pay["evidence"] = sum(fact in have for fact in self.task.path) / len(self.task.path)
        pay |= {"format": float(proper), "turns": 1.0}
        pay["penalty"] = 0.0 if proper else -self.settings.penalties[role]
        self.turn += 1
        return pay


# -- whole episodes ----------------------------------------------------------------------------------------------------


def play(config, rows, speak):
    """Episodes of a team: prompts, completions and rewards of each turn. ``speak(turn, prompts)`` -> completions."""
    begin, observe, step = program(config)
    state, out = begin(rows), []
    for turn in range(4):
        seen = jax.device_get(observe(state))
        prompts = [BYTES.decode(ids[0, : n[0]]) for ids, n in zip(seen.tokens, seen.length)]
        said = speak(turn, prompts)
        state, pay, done = jax.device_get(step(state, *encode(said, R)))
        out.append((prompts, seen, pay, done))
    return out


def garbage(rng, turn, n):
    """Completions that are nearly right, and random ones, with or without an end."""
    alphabet = ["abcxyz123*,,", "abc123,,,x", "abcdefghxyz19?"][min(turn, 2)]
    out = []
    for _ in range(n):
        size = rng.integers(R + 1)
        text = "".join(alphabet[i] for i in rng.integers(len(alphabet), size=size))
        if rng.random() < 0.2:
            text = "".join(chr(i) for i in rng.integers(128, size=size))
        if rng.random() < 0.5:
            text = text[: rng.integers(1, 4)]
        out.append((text, bool(len(text) < R and rng.random() < 0.9)))
    return out


CONFIGS = {
    "as it is": CONFIG,
    "few": facts.Config(
        seed=3, entities=4, relations=3, two_hops=1.0,
        pipeline=pipeline.Settings(documents=2, distractors=1, kept=1, answer_length=1, penalties=(0.1, 0.2, 0.3)),
    ),
    "all": facts.Config(two_hops=0.2, pipeline=pipeline.Settings(documents=4, distractors=0, kept=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_episodes_of_random_completions_are_those_of_a_slow_twin(name):
    """Rewards are finite and prompts bounded, whatever a model writes."""
    config, rng = CONFIGS[name], np.random.default_rng(0)
    rows = facts.make_tasks(config, n=N)
    twins, seen, said = [Twin(*of, config.pipeline) for of in texts_of(rows)], collections.Counter(), {}

    def speak(turn, prompts):
        words = garbage(rng, turn, N)
        for i, twin in enumerate(twins):  # half of the time a query or an answer that the prompt mentions
            if turn < 3 and rng.random() < 0.5:
                asked, letters = twin.task.question, re.sub("[^a-z]", "", prompts[i]) or "?"
                known = [*documents_of(prompts[i]), "a1b"]
                pick = ",".join(known[k] for k in rng.permutation(len(known))[:2])
                some = [
                    [asked[:2], asked[0], asked[:2] + ",*" + asked[-1], asked[0] + ",*,*"],
                    [pick, pick[:3], pick[:3] + "," + pick[:3]],
                ]
                some += [[twin.task.answer, letters[rng.integers(len(letters))], letters[:3]]]
                words[i] = (some[turn][rng.integers(len(some[turn]))], True)
        said[turn] = words
        return words

    for turn, (prompts, shown, pay, done) in enumerate(play(config, rows, speak)):
        for i, twin in enumerate(twins):
            assert bool(shown.active[i, 0]) == (turn < 3)
            got = {key: value[i] for key, value in pay.items()}
            if turn == 3:
                assert not any(value.any() for value in got.values()) and done[i]
                continue
            assert prompts[i] == twin.prompt() and len(prompts[i]) <= facts.prompt_length(config)
            want = twin.act(*said[turn][i])
            own = np.arange(3) == turn
            rows_of = {key: want[key] * (own | (key in ("f1", "em"))) for key in got}
            off = {key for key in got if not np.allclose(got[key], rows_of[key], atol=1e-6)}  # not finite is off, too
            assert not off, (off, prompts[i], said[turn][i])
            assert bool(done[i]) == (turn == 2)
            seen.update((turn, key, value) for key, value in want.items() if value)
            if turn == 0:
                seen[0, "nothing", 1.0] += not twin.documents
    for turn in range(3):
        assert seen[turn, "format", 1.0] > 10
        assert seen[turn, "penalty", -config.pipeline.penalties[turn]] > 10
    assert seen[0, "nothing", 1.0] > 10 and seen[2, "em", 1.0] > 2
    assert sum(count for (turn, key, _), count in seen.items() if (turn, key) == (1, "evidence")) > 2


def test_searches_of_random_queries_are_those_of_a_slow_twin():
    rng, alphabet = np.random.default_rng(0), "abcd1234*"
    pairs = [entity + relation for entity in "abcd" for relation in "1234"]
    every = [[pairs[i] + "abcd"[rng.integers(4)] for i in rng.permutation(16)[:12]] for _ in range(40)]
    run = jax.jit(lambda rows, ids, size: chained(rows, search.read_queries(ids, size, 4)))
    hits = 0
    for number in range(300):
        known = every[number % 40]
        queries = ["".join(alphabet[i] for i in rng.integers(9, size=rng.choice([1, 2, 2, 3]))) for _ in range(4)]
        queries = [rng.choice([*queries, *queries, "A", "", "é"]) for _ in range(rng.integers(1, 6))]
        text = ",".join(queries).encode()[:R]
        queries = text.decode(errors="replace").split(",")
        ids = np.pad(np.array([*text], np.int32), (0, R - len(text)), constant_values=BYTES.PAD)
        got, read = run(np.array([list(f.encode()) for f in known], np.int32), ids, len(text))
        want = twin_search(known, queries[:4])
        assert search.look_up(known, queries[:4]) == want
        assert [[f for f, hit in zip(known, row) if hit] for row in np.asarray(got)[: len(want)]] == want
        assert int(read.number) == len(queries)
        assert bool(read.clean) == all(re.fullmatch("[a-z0-9*]{1,2}", q) for q in queries)
        hits += sum(map(bool, want))
    assert hits > 100


def chained(rows, read):
    """The results of queries that were read, and the queries."""
    out, last = [], jnp.int32(-1)
    for i in range(4):
        out.append(read.proper[i] & search.search(rows, read.text[i], read.size[i], last))
        last = search.last_entity(rows, out[-1])
    return jnp.stack(out), read


FACTS = ("a1c", "b1a", "a2d", "c2x", "a3x", "a4c")
SEARCHES = [
    (["a1"], [["a1c"]]),
    (["a"], [["a1c", "a2d", "a3x"]]),  # three at most
    (["a1", "*2"], [["a1c"], ["c2x"]]),
    (["b1", "*1", "*2"], [["b1a"], ["a1c"], ["c2x"]]),
    (["a1", "*"], [["a1c"], ["c2x"]]),
    (["*1"], [[]]),  # nothing before it
    (["z", "*2"], [[], []]),  # the one before it returned nothing
    (["1", "a9", "a1c", "A1", ""], [[], [], [], [], []]),
]


@pytest.mark.parametrize("queries, want", SEARCHES, ids=[",".join(q) for q, _ in SEARCHES])
def test_results_of_a_search(queries, want):
    assert search.look_up(FACTS, queries) == want == twin_search(FACTS, queries)


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_answers_are_unique_and_nothing_is_known_beforehand():
    rows = facts.make_tasks(CONFIG, n=1500)
    hops, letters, places = collections.Counter(), collections.Counter(), collections.Counter()
    for (task, noise), row in zip(texts_of(rows), rows["path"]):
        assert len(task.facts) == len({fact[:2] for fact in task.facts}) == 12  # one entity for each relation
        at = task.question[0]
        for relation, fact in zip(task.question[1:], task.path, strict=True):
            (only,) = (other for other in task.facts if other[:2] == at + relation)
            assert only == fact
            at = fact[2]
        assert at == task.answer and all(fact[0] != fact[2] for fact in task.facts)
        assert sorted(noise) == [*range(12)]
        hops[len(task.path)] += 1
        letters[ord(task.answer)] += 1
        places[row[0]] += 1
    assert abs(hops[2] / 1500 - 0.5) < 0.05
    assert set(map(chr, letters)) == set(tasks.LETTERS) and max(letters.values()) < 1500 * 0.12
    assert len(places) == 12 and max(places.values()) < 1500 * 0.12


def test_sides_of_the_split_share_no_task():
    sides = [{tasks.content(t) for t, _ in texts_of(facts.make_tasks(CONFIG, n=600, held_out=h))} for h in (0, 1)]
    assert not sides[0] & sides[1] and all(map(splits.is_held_out, sides[1]))
    assert not any(map(splits.is_held_out, sides[0]))
    one = texts_of(facts.make_tasks(CONFIG, n=1))[0][0]
    assert tasks.content(one._replace(facts=one.facts[::-1])) == tasks.content(one)


# -- teams -------------------------------------------------------------------------------------------------------------


def team_of(rewriter, selector, generator):
    """Completions of three functions of the prompt and the task."""
    roles = (rewriter, selector, generator, lambda prompt, task: "")
    return lambda known: lambda turn, prompts: [(roles[turn](p, t), True) for p, (t, _) in zip(prompts, known)]


def documents_of(prompt):
    return re.findall("...", prompt[1:].split("|")[0])


kept_of = documents_of


PERFECT = (
    lambda prompt, task: ",".join(pipeline.good_queries(task)),
    lambda prompt, task: ",".join(pipeline.good_quotes(task, documents_of(prompt))),
    lambda prompt, task: pipeline.good_answer(task, kept_of(prompt)),
)


@functools.cache
def held_out(n=N):
    return facts.make_tasks(CONFIG, n=n, held_out=True)


def earned(team):
    """Mean F1 plus penalties of a team, and mean components over roles."""
    rows = held_out()
    turns = play(CONFIG, rows, team(texts_of(rows)))
    sums = {key: sum(np.asarray(pay[key]) for _, _, pay, _ in turns).mean(0) for key in pipeline.COMPONENTS}
    return float(sums["f1"][0] + sums["penalty"].sum()), sums


def test_a_perfect_team_reaches_f1_one():
    value, sums = earned(team_of(*PERFECT))
    assert value == 1.0 and sums["em"].tolist() == [1.0] * 3 and sums["evidence"].tolist() == [1.0, 1.0, 0.0]
    assert sums["format"].tolist() == sums["turns"].tolist() == [1.0] * 3


def test_every_role_matters():
    """Without the second query, or with the first documents, a perfect rest of the team earns less."""
    rewriter, selector, generator = PERFECT
    once = earned(team_of(lambda p, t: t.question[:2], selector, generator))[0]
    first = earned(team_of(rewriter, lambda p, t: ",".join(documents_of(p)[:2]), generator))[0]
    assert 0.4 < once < 0.75 and first < 0.75


def demonstrating(rng):
    """The team of demonstrators."""
    return team_of(
        lambda p, t: ",".join(pipeline.demonstrated_queries(rng, SETTINGS, t)),
        lambda p, t: ",".join(pipeline.demonstrated_quotes(rng, SETTINGS, t, documents_of(p))),
        lambda p, t: pipeline.demonstrated_answer(rng, SETTINGS, t, kept_of(p)),
    )


CONSTANT = {
    "rewriter": {
        "nothing": lambda p, t: "",
        "the entity": lambda p, t: t.question[0],
        "the entity four times": lambda p, t: ",".join([t.question[0]] * 4),
        "one query": lambda p, t: "a1",
        "twelve letters": lambda p, t: "a" * R,
    },
    "selector": {
        "nothing": lambda p, t: "",
        "first three": lambda p, t: ",".join(documents_of(p)[:3]),
        "first": lambda p, t: ",".join(documents_of(p)[:1]),
        "last two": lambda p, t: ",".join(documents_of(p)[-2:]),
        "repeated": lambda p, t: ",".join(documents_of(p)[:1] * 2),
    },
    "generator": {
        "nothing": lambda p, t: "",
        "one letter": lambda p, t: "a",
        "the question": lambda p, t: t.question[0],
        "the last letter": lambda p, t: ("".join(kept_of(p)) or "a")[-1],
        "two ends": lambda p, t: "".join(fact[2] for fact in kept_of(p))[-2:],
        "all letters": lambda p, t: "".join(dict.fromkeys("".join(kept_of(p))[::1])),
    },
}


def test_degenerate_teams_earn_less_than_demonstrators():
    """Every team of three constant strategies."""
    bar = earned(demonstrating(np.random.default_rng(0)))[0]
    assert 0.2 < bar < 0.4
    for rewriter in CONSTANT["rewriter"].items():
        for selector in CONSTANT["selector"].items():
            for generator in CONSTANT["generator"].items():
                names, roles = zip(rewriter, selector, generator)
                value, _ = earned(team_of(*roles))
                assert value < bar, (names, value, bar)


def rewards_of(*said):
    """The rewards of one episode by component [T A], with completions that end."""
    rows = {k: v[:1].repeat(N, axis=0) for k, v in held_out().items()}
    turns = play(CONFIG, rows, lambda turn, prompts: [(said[min(turn, 2)], True)] * N)
    return {key: np.stack([pay[key][0] for _, _, pay, _ in turns[:3]]) for key in pipeline.COMPONENTS}


def test_golden_penalties():
    """Five queries, a quote of no document, an answer that is too long: -.5, -1 and -1, each to its role alone."""
    got = rewards_of("a,b,c,d,e", "a1b,a1b", "abc")
    np.testing.assert_allclose(got["penalty"], np.diag([-0.5, -1.0, -1.0]))
    assert not got["format"].any() and got["turns"].tolist() == np.eye(3).tolist()


IN_FORM = ["a1", "a,b,c,d", "a1,b2,c3,d4", "*", "99", "a1,*2,*3"]
OUT_OF_FORM = ["", "a1,", ",a1", "abc", "A1", "a 1", "a-", "a,b,c,d,e", "a1;b2", "a1,b?"]


@pytest.mark.parametrize("said", [*IN_FORM, *OUT_OF_FORM])
def test_the_form_of_queries(said):
    """A malformed query is counted and penalised. An empty retrieval is in form, and nothing is shown."""
    got = rewards_of(said, "", "")
    assert got["format"][0, 0] == (said in IN_FORM)
    assert got["penalty"][0, 0] == (0 if said in IN_FORM else -0.5)
    assert got["format"][1:].tolist() == [[0, 1, 0], [0, 0, 1]]


# -- demonstrations ----------------------------------------------------------------------------------------------------


def demonstrated(n=3000):
    """Role -> (prompt, completion) of demonstrations without exercises."""
    out = {}
    for role, d in facts.demonstrations(dataclasses.replace(CONFIG, copying=0.0), 0, n).items():
        rows = zip(*(d[k] for k in ("tokens", "length", "completion", "completion_length")), strict=True)
        out[role] = [(BYTES.decode(p[:n]), BYTES.decode(c[:m]), c[m - 1]) for p, n, c, m in rows]
    return out


def test_demonstrators_err_as_often_as_the_settings_say():
    shown = demonstrated()
    assert all(last == BYTES.EOS for rows in shown.values() for _, _, last in rows)
    assert max(len(p) for rows in shown.values() for p, *_ in rows) <= facts.prompt_length(CONFIG) <= 64
    share = lambda values: float(np.mean([*values]))
    asked = [(p[1:-1], said.split(",")) for p, said, _ in shown["rewriter"]]
    assert abs(share(len(q) == 5 for _, q in asked) - SETTINGS.flood_rate) < 0.02
    assert abs(share(q[0] == p[0] for p, q in asked) - SETTINGS.broad_rate) < 0.03
    hops = [q[1:2] != ["*" + p[2]] for p, q in asked if len(p) == 3]
    assert abs(share(hops) - SETTINGS.hop_error_rate) < 0.04
    quotes = [said.split(",") for _, said, _ in shown["selector"] if said]
    assert abs(share(len(set(said)) < len(said) for said in quotes) - SETTINGS.repeat_rate) < 0.02
    answers = [(p, said) for p, said, _ in shown["generator"]]
    assert abs(share(len(said) == 3 for _, said in answers if said) - SETTINGS.long_rate) < 0.02
    alone = [(re.fullmatch(r"G(..)(.)\|\1>", p), said) for p, said in answers]  # the fact that answers, and no other
    wrong = [said[0] != kept[2] for kept, said in alone if kept]
    assert len(wrong) > 300 and abs(share(wrong) - SETTINGS.answer_error_rate) < 0.06


BAD = [
    ({"entities": 2}, r"config\.env\.args\.entities: expected 3 to 12, got 2"),
    ({"relations": 7}, r"config\.env\.args\.relations: expected 2 to 6, got 7"),
    ({"entities": 4, "relations": 2}, r"config\.env\.args\.relations: expected at least 3 with entities=4: a task has"),
    ({"two_hops": 1.5}, r"config\.env\.args\.two_hops: expected a probability in \[0, 1\], got 1\.5"),
    ({"protocol": "debate"}, r"config\.env\.args\.protocol: .*pipeline"),
    ({"pipeline": {"documents": 13}}, r"config\.env\.args\.pipeline\.documents: expected 1 to 12, got 13"),
    ({"pipeline": {"distractors": 6}}, r"config\.env\.args\.pipeline\.distractors: expected 0 to 5, got 6"),
    ({"pipeline": {"kept": 0}}, r"config\.env\.args\.pipeline\.kept: expected 1 to 3, got 0"),
    ({"pipeline": {"answer_length": 11}}, r"config\.env\.args\.pipeline\.answer_length: expected 1 to 10, got 11"),
    ({"pipeline": {"penalties": (1.0, -1.0, 1.0)}}, r"config\.env\.args\.pipeline\.penalties: expected three finite"),
    ({"pipeline": {"long_rate": 2.0}}, r"config\.env\.args\.pipeline\.long_rate: expected a probability"),
    ({"pipeline": {"retriever": "bm25"}}, r"config\.env\.args\.pipeline.*retriever"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("facts", bad).check("config.env")
    assert "\n" not in str(error.value)


KEPT = [
    ("a2d,c2x", [2, 3], True),
    ("c2x,a2d", [3, 2], True),
    ("", [], True),
    ("a2d,a2d", [2], False),
    ("a2d,a2d,c2x", [2, 3], False),
    ("b1a", [], False),  # a fact that is no document
    ("b1a,c2x", [3], False),
    ("a2,c2x", [3], False),
    ("a2dd,c2x", [3], False),
    ("a2d,", [2], False),
    (",", [], False),
    ("a2dc2x", [], False),
    ("c2x,a2d,a3x", [3, 2], True),  # two are kept at most
]


@pytest.mark.parametrize("said, places, proper", KEPT, ids=[said or "nothing" for said, *_ in KEPT])
def test_what_a_selector_keeps(said, places, proper):
    """Repeated quotes are kept once. Quotes of no document are not kept."""
    words, length = encode([(said, True)], R)
    task = {"facts": jnp.array([[*fact.encode()] for fact in FACTS])}
    documents = jnp.array([2, 3, 4, -1, -1, -1])
    got = pipeline.select(SETTINGS, task, documents, jnp.array(words[0]), jnp.bool_(True), length[0, 0] - 1)
    assert [place for place in got.places.tolist() if place >= 0] == places and bool(got.proper) == proper
    got = pipeline.select(SETTINGS, task, documents, jnp.array(words[0]), jnp.bool_(False), length[0, 0] - 1)
    assert got.places.tolist() == [-1, -1] and not got.proper  # without eos


def test_more_quotes_than_documents_are_out_of_form():
    words, length = encode([("a2d,c2x,b1a", True)], R)
    task = {"facts": jnp.array([[*fact.encode()] for fact in FACTS])}
    got = pipeline.select(SETTINGS, task, jnp.array([2, 3]), jnp.array(words[0]), jnp.bool_(True), length[0, 0] - 1)
    assert got.places.tolist() == [2, 3] and not got.proper


def test_exercises_copy_a_text_from_another_place_on():
    """A completion is a rotation of the text. The share is that of the settings, for every role."""
    for share in (0.0, 0.3, 1.0):
        for d in facts.demonstrations(dataclasses.replace(CONFIG, copying=share), 0, 1000).values():
            rows = zip(d["tokens"], d["length"], d["completion"], d["completion_length"], strict=True)
            texts = [(bytes(p[:n].tolist()).decode(), bytes(c[: m - 1].tolist()).decode()) for p, n, c, m in rows]
            copies = [(p[1:-1], said) for p, said in texts if p[0] == "R"]
            assert abs(len(copies) / 1000 - share) < 0.05
            assert all(len(said) == len(text) and said in text + text for text, said in copies)
            starts = [(text + text).index(said) for text, said in copies]
            of_facts = [
                re.fullmatch("(?:[a-z][1-9][a-z]){3,5}", text) and re.match("[a-z][1-9]", said) for text, said in copies
            ]
            if copies:
                assert abs(np.mean([bool(x) for x in of_facts]) - 0.5) < 0.1 and max(starts) > 9
