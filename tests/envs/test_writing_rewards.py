"""Rewards of the writing tasks: golden values, a naive twin, the edges of each band, and hacks that must not pay."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.envs.writing import env as writing
from jaxmarl_llm.envs.writing import prose, rouge
from jaxmarl_llm.envs.writing import rewards as wr

CAT = "The cat sat on the mat today and it was happy"
DOG = (
    "The cat sat on the mat today. However, the dog chased birds near river banks; therefore everyone laughed loudly "
    "and shouted"
)


def numbered(stem, start, stop):
    return " ".join(f"{stem}{i}" for i in range(start, stop))


# -- the official rule -------------------------------------------------------------------------------------------------

GOLDEN = [
    (wr.TLDR, CAT, DOG, 2.748571428571428),
    (wr.TLDR, "too short", DOG, 0.0),
    (wr.TLDR, CAT, CAT, 0.5),
    (wr.TLDR, numbered("alpha", 0, 10), numbered("bravo", 0, 22), 2.0),
    (wr.ARXIV["2026"], numbered("qz", 0, 150), numbered("qz", 100, 300), 2.3931159420289854),
]


@pytest.mark.parametrize("spec, c1, c2, total", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_values_of_the_official_functions(spec, c1, c2, total):
    """Published results of running the authors' reward functions; the length limit does not count there."""
    assert sum(wr.score(spec, c1, c2, mode="parity", truncated=True).values()) == pytest.approx(total, abs=1e-9)
    assert sum(wr.score(spec, c1, c2, mode="parity").values()) == pytest.approx(total, abs=1e-9)


def test_the_golden_texts_are_the_published_ones():
    assert (len(CAT), len(DOG)) == (45, 123) and len(wr.STOPWORDS) == 106 and len(wr.TRANSITIONS) == 12


def naive(task, band, c1, c2):
    """The official rule once more, as a list of components, in the order in which it is told."""
    got = [0.0] * 5
    low, high = (8, 256) if task == "tldr" else (128, 256)
    for text in (c1, c2):
        if len(text.split()) < low or len(text.split()) > high:
            return got
    got[0] = 0.5
    q = len(c2) / len(c1)
    if task == "tldr":
        a, b, c, d = 1.1, 1.6, 3.2, 5.0
    elif band == "paper":
        a, b, c, d = 0.8, 1.0, 1.3, 1.5
    else:
        a, b, c, d = 0.8, 1.3, 1.6, 2.0
    if q < a or q > d:
        return got
    got[1] = (q - a) / (b - a) if q < b else 1 - (q - c) / (d - c) if q > c else 1
    one, two = [], []
    for text, bag in ((c1, one), (c2, two)):
        for word in re.findall(r"\b\w+\b", text.lower()):
            if word not in bag:
                bag.append(word)
    if not one:
        return got
    u = len(two) / len(one)
    if task == "tldr":
        if u < 1.3:
            return got
        got[2] = 0.5 if u >= 2 else 0.5 * (u - 1.3) / 0.7
    else:
        if u < 0.5 or u > 1.7:
            return got
        got[2] = 0.5 * (u - 0.5) / 0.2 if u < 0.7 else 0.5 * (1 - (u - 1.3) / 0.4) if u > 1.3 else 0.5
    count = 0
    for phrases in wr.TRANSITIONS.values():
        for phrase in phrases:
            if (c2 if task == "tldr" else c1 + " " + c2).lower().find(phrase) >= 0:
                count += 1
                break
    if count:
        got[3] = 0.4 * min(1, 0.4 + 0.05 * (count - 1))
    one, two = ([w for w in bag if w not in wr.STOPWORDS] for bag in (one, two))
    both = len([w for w in one if w in two])
    j = both / (len(one) + len(two) - both) if one or two else 1
    cap = 0.03 if task == "tldr" else 0.23
    got[4] = 0.6 * min(j, cap) / cap
    return got


VOCABULARY = "the of However, because; WASTED moreover. x cat's über 12 -- model train-ing data for example i such as"
FILLER = [*VOCABULARY.split(" "), *(f"w{i}" for i in range(400))]


@st.composite
def pairs(draw, task):
    """Texts whose lengths and vocabularies lie around the bands."""
    rng = draw(st.randoms(use_true_random=False))
    n = draw(st.integers(6, 60) if task == "tldr" else st.integers(122, 256))
    factor = draw(st.floats(0.9, 5.5) if task == "tldr" else st.floats(0.5, 2.1))
    pools = [FILLER[: draw(st.integers(2, len(FILLER)))] for _ in range(2)]
    return [" ".join(rng.choice(pool) for _ in range(int(k))) for pool, k in zip(pools, (n, n * factor))]


@pytest.mark.parametrize("task, band", [("tldr", "paper"), ("arxiv", "paper"), ("arxiv", "2026")])
def test_parity_equals_its_naive_twin(task, band):
    reached = [0] * 5

    @given(pairs(task))
    def check(texts):
        got = wr.tldr(*texts, mode="parity") if task == "tldr" else wr.arxiv(*texts, band, mode="parity")
        assert list(got) == list(wr.COMPONENTS)
        expected = naive(task, band, *texts)
        assert list(got.values()) == pytest.approx(expected, abs=1e-9)
        for i, value in enumerate(expected):
            reached[i] += value > 0

    for _ in range(4):
        check()
    assert min(reached) > 0, reached  # the texts must reach every level


@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80), st.sampled_from(wr.MODES))
def test_any_text_has_a_finite_reward(c1, c2, source, mode):
    for spec in (wr.TLDR, *wr.ARXIV.values()):
        got = wr.score(spec._replace(limits=(1, 256)), c1, c2, mode=mode, source=source)
        assert set(got) == set(wr.COMPONENTS) and all(0 <= v <= 1 for v in got.values())


EDGES = {
    "tldr": [(1.09, None), (1.1, 0), (1.35, 0.5), (1.6, 1), (3.2, 1), (4.1, 0.5), (5.0, 0), (5.01, None)],
    "paper": [(0.79, None), (0.8, 0), (0.9, 0.5), (1.0, 1), (1.3, 1), (1.4, 0.5), (1.5, 0), (1.51, None)],
    "2026": [(0.79, None), (0.8, 0), (1.05, 0.5), (1.3, 1), (1.6, 1), (1.8, 0.5), (2.0, 0), (2.01, None)],
}


@pytest.mark.parametrize("name, q, paid", [(n, *row) for n, rows in EDGES.items() for row in rows])
def test_edges_of_the_length_bands(name, q, paid):
    """At an edge the credit is 0 but the next levels count; beyond it they do not."""
    spec = wr.TLDR if name == "tldr" else wr.ARXIV[name]
    n = 16 if name == "tldr" else 128
    c1 = _of_length(numbered("w", 100, 100 + n), 1000)
    c2 = _of_length(numbered("w", 100, 100 + (2 * n if name == "tldr" else n)), round(1000 * q))
    got = wr.score(spec, c1, c2, mode="parity")
    assert got["words"] == 0.5 and got["ratio"] == pytest.approx(paid or 0.0, abs=1e-9)
    assert (got["unique"], got["jaccard"]) == ((0.0, 0.0) if paid is None else (0.5, pytest.approx(0.6)))


def _of_length(text, length):
    return text + "." * (length - len(text))  # punctuation is no word, but counts as characters


UNIQUE = {
    "tldr": [(1.29, None), (1.3, 0), (1.65, 0.25), (2.0, 0.5), (9.0, 0.5)],
    "paper": [(0.49, None), (0.5, 0), (0.6, 0.25), (0.7, 0.5), (1.3, 0.5), (1.5, 0.25), (1.7, 0), (1.71, None)],
}


@pytest.mark.parametrize("name, u, paid", [(n, *row) for n, rows in UNIQUE.items() for row in rows])
def test_edges_of_the_vocabulary_bands(name, u, paid):
    spec = (wr.TLDR if name == "tldr" else wr.ARXIV[name])._replace(limits=(1, 10_000))
    c1, c2 = (_of_length(numbered("w", 0, k), 6000) for k in (100, round(100 * u)))
    if name == "tldr":
        c2 = _of_length(c2, 12_000)
    got = wr.score(spec, c1, c2, mode="parity")
    assert got["unique"] == pytest.approx(paid or 0.0, abs=1e-9)
    assert (got["jaccard"] > 0) == (paid is not None)


@pytest.mark.parametrize("count, paid", [(7, 0.0), (8, 0.5), (256, 0.5), (257, 0.0)])
@pytest.mark.parametrize("mode", wr.MODES)
def test_limits_of_words(count, paid, mode):
    text, other = numbered("w", 0, count), numbered("w", 300, 310)
    spec = wr.TLDR._replace(limits=(3, 9))
    for pair in ((text, other), (other, text)):
        assert wr.levels(wr.TLDR, *pair, mode=mode).values["words"] == paid
    assert wr.levels(spec, numbered("w", 0, 5), numbered("w", 10, 18), mode=mode).values["words"] == 0.5


@pytest.mark.parametrize("categories, paid", [(0, 0.0), (1, 0.4), (2, 0.45), (12, 0.95), (0.5, 0.2)])
def test_what_transitions_pay(categories, paid):
    assert wr._paid(categories) == pytest.approx(paid)


# -- strict: by hand, and what must not pay ----------------------------------------------------------------------------

PLAIN = "Our model reads long texts well. It learns slowly from small data."


@pytest.mark.parametrize(
    "text, categories",
    [
        (PLAIN, 0),
        (PLAIN.replace("It", "However, it"), 1),
        ("Wasted thirsty whereabouts sobbing butter. " + PLAIN, 0),  # inside words
        (PLAIN.replace("Our", "Therefore our").replace("It", "However, it"), 0),  # every sentence
        (
            f"{PLAIN} Then our reader sees the third page. Two more pages follow it soon.".replace("It", "However, it"),
            2,
        ),
        (PLAIN + " However therefore moreover for example finally.", 0),  # no sentence
        (PLAIN.replace("It", "However therefore it"), 0),  # side by side
        (PLAIN.replace("It", "However, it") + " However." * 5, 0),  # repeated
    ],
)
def test_connectives_in_strict_mode(text, categories):
    assert wr._linked((text,), "", wr.Lists()) == pytest.approx(categories)


def test_strict_lengths_are_those_of_distinct_words_of_the_source():
    lists = wr.Lists()
    measured = wr._essence("However, the cats, the cats and a dog ran.", "A cat, cats and dogs run.", lists)
    assert measured.distinct == {"cats"} and measured.length == 4 and measured.content == {"cats", "dog", "ran"}
    # five letters must agree: "dog" is not "dogs", "summarised" is "summary"
    assert wr._essence("summarised", "a summary", lists).length == 10
    assert wr._essence("the cats and a dog", "", lists).length == 7
    counts = [wr._essence(t, "a cat ran", lists).words for t in ("cat xq zz qx xz", "cat ran the qx xz", "however cat")]
    assert counts == [2, 5, 1]  # unknown words count as far as known ones match them


SOURCE = numbered("source", 10, 50)


@pytest.mark.parametrize(
    "name, c1, c2, factor",
    [
        ("repetition", SOURCE, numbered("x", 0, 9), 1.0),
        ("repetition", SOURCE, "no more words " * 9, 0.0),
        ("ended", "It ends.", 'Does it "end?")', 1.0),
        ("ended", "It ends.", "It does not", 0.0),
        ("ended", "It ends,", "It ends.", 0.0),
        ("prose", "source10 " * 9, "The cat sat on the mat.", 0.0),  # no function word
        ("prose", "The cat sat on the mat.", "A cat of the is on of a mat by with.", 0.0),  # no order
        ("prose", "The cat sat on the mat.", "A dog of theirs was fed in time.", 1.0),
        ("order", "source11 x source12", "source10 source11", 0.0),
        ("order", "source10 source11 y", "source10 source11", 1.0),
        ("joints", "source10 the source11 of source12 in source13", "x", 0.0),  # function words where none were
        ("joints", "source10 the source11 of source12 x source13", "x", 1.0),  # two places say nothing yet
        ("joints", numbered("source", 10, 30), "x", 1.0),
        ("reworded", numbered("source", 10, 30), "x", 0.5),
        ("reworded", "source10 x source11 y source12", "x", 0.5),  # invented words are no words of one's own
        ("reworded", "source10 the source11", "x", 0.5),  # neither are function words between the source's
        ("reworded", "source10 source20 source11", "x", 1.0),  # another order is
        ("reworded", "y", numbered("source", 10, 30), 1.0),  # of the second text nothing is asked
        ("repetition", "", SOURCE, 0.0),
        ("partner", SOURCE, numbered("source", 10, 40), 0.0),
        ("partner", SOURCE, numbered("x", 10, 40), 1.0),
        ("prompt", SOURCE, "x", 0.0),
        ("prompt", "x", numbered("source", 10, 42), pytest.approx(0.5)),  # 32 of 40 words
        ("prompt", "x", numbered("source", 10, 38), 1.0),
        ("faithful", SOURCE, "nothing of it", 0.0),
        ("faithful", SOURCE, numbered("source", 10, 13) + " the within x y", pytest.approx(0.5)),  # 3 of 5 words
        ("faithful", SOURCE, "source10 source11 x y", 0.0),  # the floor: half
        ("faithful", SOURCE, "source10 source11 source12 x", 1.0),
    ],
)
def test_guards(name, c1, c2, factor):
    assert wr.guards(wr.TLDR, c1, c2, SOURCE)[name] == factor


GIVEN = (
    "A rapid network of sensors finds small leaks in old pipes. It needs less energy than the usual sensors do. "
    "Engineers of seven cities tested the design during winter and reported fewer repairs, lower prices and joy."
)
SHORT = "Sensors in a network find leaks of old pipes with less energy."
LONGER = "A network of sensors finds small leaks in old pipes. However, it needs less energy than usual sensors do."


def test_only_a_pair_that_ends_is_paid():
    paid = lambda c1, c2, **kw: sum(wr.tldr(c1, c2, source=GIVEN, **kw).values())
    assert paid(SHORT, LONGER) > 0.5
    assert paid(SHORT, LONGER, truncated=True) == paid(SHORT[:-1], LONGER) == paid(SHORT, LONGER[:-1]) == 0.0


def test_an_invented_word_never_pays():
    """Whatever is added to whichever text, and wherever its ratio stands."""
    words = ["camel", "orchestra", "lemon", "bakery", "volcano", "trumpet"]
    for short, longer in ((SHORT, LONGER), (SHORT, f"{LONGER} {LONGER}"), (LONGER, SHORT), (SHORT, SHORT)):
        for count in range(1, 7):
            extra = " ".join(words[:count])
            for pair in ((f"{short[:-1]} {extra}.", longer), (short, f"{longer[:-1]} {extra}.")):
                before, after = (wr.levels(wr.TLDR, *p, source=GIVEN) for p in ((short, longer), pair))
                assert after.values.get("ratio", 0.0) <= before.values.get("ratio", 0.0) + 1e-9, (count, pair)
    totals = [sum(wr.tldr(f"{SHORT[:-1]} {' '.join(words[:n])}.", LONGER, source=GIVEN).values()) for n in range(7)]
    assert totals == sorted(totals, reverse=True) and totals[0] > 1 and totals[6] == 0.0


def test_words_of_the_source_are_backed_by_their_first_letters():
    begins = wr._begins("Learning to summarise papers")
    assert wr.backed("We learned summaries of a paper", begins) == 1.0  # "learn", "summa", "paper"
    assert wr.backed("Learning about trees", begins) == 0.5
    assert wr.backed("the of within", begins) == 0.0  # no content word at all


@given(st.text(max_size=200))
def test_prose_of_any_text(text):
    assert 0 <= prose.misfits(text) <= 2 * len(text) and 0 <= prose.neighbours(text, text) <= 1
    assert not prose.ended(text + " x")


def test_rouge_by_hand():
    assert rouge.rouge("The cat sat.", []) == {"rouge1": 0.0, "rougeL": 0.0}
    got = rouge.rouge("the cat sat on the mat", ["a dog", "the mat sat, on: THE cat"])
    assert got == {"rouge1": 1.0, "rougeL": pytest.approx(8 / 12)}  # the sat on the: 4 words of 6 and 6
    assert rouge.rouge("the the the", ["the cat"])["rouge1"] == pytest.approx(2 / 5)


def honest(config):
    """(text, first, second, prompt) of the demonstrations: words of the papers' authors."""
    rows = []
    for task in writing.tasks(config):
        samples = writing.demonstrations(config, [task])
        if samples:
            (_, prompt, c1), (_, _, c2) = samples
            if len(wr.SENTENCE.split(c2)) >= 2:
                rows.append((writing.given(task), c1, c2, "\n".join(m.text for m in prompt)))
    return rows


def hacks(source, c1, c2, prompt):
    """name -> joint text; all are cheaper than writing."""
    phrases = [p for row in wr.TRANSITIONS.values() for p in row]
    rng = random.Random(0)
    salted = c2.split()
    for phrase in phrases:
        salted.insert(rng.randrange(len(salted)), phrase)
    long_words = [row[-1] for row in wr.TRANSITIONS.values()]
    sentences = wr.SENTENCE.split(c2)
    shuffled = source.split()
    rng.shuffle(shuffled)
    second = {
        "nothing": "",
        "blanks": " " * 300,
        "padded with blanks": c2 + " " * 200,
        "padded with dots": c2 + " ." * 30,
        "padded with one word": c2 + " model" * 30,
        "padded with filler": f"{c2} {numbered('filler', 0, 30)}",
        "padded with a long word": c2 + " " + "x" * 300,
        "said twice": f"{c2} {c2}",
        "connectives only": " ".join(phrases),
        "a list of connectives behind": f"{c2} {', '.join(long_words)}.",
        "however behind": c2 + " however" * 20,
        "however everywhere": " ".join(f"However, {s}" for s in sentences),
        "a connective everywhere": " ".join(f"{long_words[i % 12]}, {s}" for i, s in enumerate(sentences)),
        "salted with connectives": " ".join(salted),
        "the source": source,
        "the source, shuffled": " ".join(shuffled),
        "the prompt": prompt,
        "the instruction": prompt.split("\n")[0],
        "the other text": c1,
        "the other text and more": f"{c1} {c2}",
    }
    return {name: (c1, text) for name, text in second.items()} | {
        "nothing first": ("", c2),
        "the source first": (source, c2),
        "the source twice": (source, source),
        "the prompt twice": (prompt, prompt),
    }


def total_score(config, pair, mode, source):
    """Sum of the components of the reward of two completions."""
    return sum(wr.score(config.spec, *pair, mode=mode, source=source).values())


SHIPPED = {
    "tldr": {},
    "tldr, small": {"min_words": 5, "max_words": 48},
    "arxiv": {"task": "arxiv", "min_words": 30},
    "arxiv, 2026": {"task": "arxiv", "band": "2026", "min_words": 30},
}


@pytest.mark.parametrize("args", SHIPPED.values(), ids=SHIPPED)
def test_hacks_do_not_pay_in_strict_mode(args):
    config = writing.Config(count=32, **args)
    rows, pays = honest(config), dict.fromkeys(wr.MODES, 0)
    assert len(rows) >= 10
    for source, c1, c2, prompt in rows:
        for mode in wr.MODES:
            honest_score = total_score(config, (c1, c2), mode, source)
            for name, pair in hacks(source, c1, c2, prompt).items():
                more = total_score(config, pair, mode, source) > honest_score + 1e-9
                pays[mode] += more
                assert mode == "parity" or not more, (name, c2)
    assert pays["parity"] > 0  # the canary can sing: the official rule falls for some of them


def test_honest_examples_do_well_in_strict_mode():
    totals = [sum(wr.tldr(c1, c2, source=source).values()) for source, c1, c2, _ in honest(writing.Config())]
    assert min(totals) > 0.5 and sorted(totals)[len(totals) // 2] > 2.5 and sum(totals) / len(totals) > 2.3
