"""Consult: whole episodes against a slow twin, the rank of a diagnosis, tables, patients, budgets, demonstrations."""

import collections

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.consult import array as consult
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
CONFIGS = {"2 to 6": consult.Config(noise=0.3), "8": consult.Config(budgets=(8,), seed=3, unknown=1.0)}


class Twin:
    """A consultation in plain Python, written from the docstring of the environment."""

    def __init__(self, task):
        self.table, self.answers, self.truth = (task[k].tolist() for k in ("table", "answers", "diagnosis"))
        self.left, self.told, self.over = int(task["budget"]), [], False

    def prompt(self):
        letters = {"y": str, "n": str.upper, "u": lambda q: "klmnopqrst"["abcdefghij".index(q)], "?": str}
        return f"D{self.left}" + "".join(letters[a](q) for q, a in self.told) + ">"

    def rank(self, named):
        if named == self.truth:
            return 5
        known = {"abcdefghij".index(q): "nyu".index(a) for q, a in self.told if q != "?" and a != "u"}
        agrees = [sum(row[s] == a for s, a in known.items()) for row in self.table]
        rivals = [d for d in range(8) if d not in (named, self.truth) and agrees[d] >= agrees[named]]
        return max(0, 4 - len(rivals))

    def say(self, text, ended):
        pay = collections.Counter()
        if self.over:
            return pay
        pay["turns"] = 1
        self.left -= 1
        letter = text if ended and len(text) == 1 else "malformed"
        if letter in "STUVWXYZ":
            named = "STUVWXYZ".index(letter)
            pay["diagnosis"], pay["accuracy"], self.over = self.rank(named), int(named == self.truth), True
            return pay
        if letter in "abcdefghij":
            answer = "nyu"[self.answers["abcdefghij".index(letter)]]
            if letter in [q for q, _ in self.told]:
                pay["repeated"] = -2
            elif answer == "u":
                pay["unknown"] = -1
            else:
                pay["valid"] = 1
            self.told.append((letter, answer))
        else:
            pay["malformed"] = -2
            self.told.append("??")
        if self.left == 0:
            pay["exhausted"], self.over = -5, True
        return pay


def random_words(rng, n):
    """Completions of two tokens: questions, diagnoses, other bytes, and words without an end."""
    kinds = rng.choice(4, n, p=(0.75, 0.13, 0.06, 0.06))
    pick = lambda letters: letters[rng.integers(len(letters))]
    words = [pick(("abcdefghij", "STUVWXYZ", "k?5 RA[", "aT")[kind]) for kind in kinds]
    tails = [BYTES.EOS if kind < 3 else ord(pick("aT")) for kind in kinds]
    return np.array([[ord(word), tail] for word, tail in zip(words, tails)], np.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_episodes_are_those_of_a_slow_twin(name):
    config, n, rng = CONFIGS[name], 600, np.random.default_rng(0)
    env, tasks = consult.make(config), consult.make_tasks(config, n=n)
    twins = [Twin({k: v[i] for k, v in tasks.items()}) for i in range(n)]
    both = jax.jit(
        jax.vmap(lambda state, words: (env.observe(state), env.step(KEY, state, words[None], np.array([2]))))
    )
    state, seen = jax.vmap(lambda task: env.reset(KEY, task))(tasks), collections.Counter()
    for _ in range(config.turns + 1):
        words = random_words(rng, n)
        shown, (state, paid, done) = jax.device_get(both(state, words))
        for i, twin in enumerate(twins):
            assert bool(shown.active[i, 0]) == (not twin.over)
            if not twin.over:
                assert BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]) == twin.prompt()
            ended = words[i, 1] == BYTES.EOS
            want = twin.say("".join(map(chr, words[i][: 1 if ended else 2])), ended)
            assert {k: float(v[i, 0]) for k, v in paid.items()} == {k: want[k] for k in consult.COMPONENTS}
            assert bool(done[i]) == twin.over
            seen.update(k for k, v in want.items() if v)
            seen[f"rank {want['diagnosis']}"] += 1
    assert all(twin.over for twin in twins)
    worth = range(6) if config.turns == 8 else (0, 1, 2, 5)  # a few answers rarely tell the wrong ones apart
    assert {*consult.COMPONENTS, *(f"rank {r}" for r in worth)} <= {k for k, count in seen.items() if count > 2}


def task_of(table, answers, diagnosis, budget):
    rows = np.array([[int(x) for x in row] for row in table], np.int32)
    return dict(table=rows, answers=np.array(answers, np.int32), diagnosis=np.int32(diagnosis), budget=np.int32(budget))


def play(task, words):
    """Total of each component over an episode in which the doctor says ``words``."""
    env = consult.make(consult.Config(budgets=(8,)))
    step, state, total = jax.jit(env.step), env.reset(KEY, task), collections.Counter()
    for word in words:
        state, paid, done = step(KEY, state, np.array([[ord(word), BYTES.EOS]], np.int32), np.array([2], np.int32))
        total.update({k: float(v[0]) for k, v in paid.items()})
    assert bool(done)
    return total


ONE_EACH = [f"{1 << (9 - d):010b}" for d in range(8)]  # diagnosis d has symptom d alone
PATIENT = [0, 1, 0, 2, 0, 0, 0, 0, 0, 0]  # of diagnosis 1, and cannot tell symptom 3


def test_three_valid_questions_one_unknown_one_repeated_and_the_right_diagnosis():
    got = play(task_of(ONE_EACH, PATIENT, 1, 6), "abcdaT")
    of_turns = {k: got[k] for k in ("valid", "unknown", "repeated", "malformed", "exhausted")}
    assert of_turns == {"valid": 3, "unknown": -1, "repeated": -2, "malformed": 0, "exhausted": 0}
    assert got["diagnosis"] == 5 and sum(of_turns.values()) + got["diagnosis"] == 5
    assert got["turns"] == 6 and got["accuracy"] == 1


@pytest.mark.parametrize(
    "words, worth",
    [("T", 5), ("S", 0), ("aS", 0), ("aU", 0), ("bU", 0), ("dU", 0)],
    ids=["right, unasked", "wrong, unasked", "denied", "tied", "all others tied", "an unknown answer counts for none"],
)
def test_a_diagnosis_is_worth_its_rank(words, worth):
    assert play(task_of(ONE_EACH, PATIENT, 1, 6), words)["diagnosis"] == worth


def test_the_nearest_wrong_diagnosis_is_worth_four():
    """The patient has a, as S and T have. Symptom b, which S lacks, brings two others level with S."""
    table = ["1000000000", "1100000000", *["0100000000"] * 2, *["0000000000"] * 4]
    patient = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert play(task_of(table, patient, 1, 6), "aS")["diagnosis"] == 4
    assert play(task_of(table, patient, 1, 6), "abS")["diagnosis"] == 2
    assert play(task_of(table, patient, 1, 6), "aU")["diagnosis"] == 0


def test_tables_have_pairs_and_differ_between_seeds():
    tables = [consult.table(consult.Config(seed=seed)) for seed in range(20)]
    assert len({table.symptoms.tobytes() for table in tables}) == 20
    for table in tables:
        apart = (table.symptoms[:, None] != table.symptoms).sum(-1)
        for d in range(8):
            assert apart[d, d ^ 1] == 2 and min(np.delete(apart[d], [d, d ^ 1])) >= 3
            assert (table.symptoms[d] != table.symptoms[d ^ 1])[~table.vague].any()
        assert table.vague.sum() == 2 and set(np.unique(table.symptoms)) == {0, 1}
    own = consult.table(consult.Config(seed=5, table_seed=7)).symptoms
    assert (own == tables[7].symptoms).all() and (own != tables[5].symptoms).any()


def test_patients_err_and_cannot_tell_as_often_as_the_settings_say():
    config, rng = consult.Config(), np.random.default_rng(0)
    table = consult.table(config)
    answers = np.stack([consult.patient(rng, config, table, d) for d in np.repeat(np.arange(8), 500)])
    truth, told = np.repeat(table.symptoms, 500, axis=0), answers != consult.UNKNOWN
    assert told[:, ~table.vague].all() and abs(np.mean(~told[:, table.vague]) - config.unknown) < 0.03
    assert abs(np.mean(answers[told] != truth[told]) - config.noise) < 0.005


@pytest.mark.parametrize("budgets, all_of", [((2, 6), {2, 3, 4, 5, 6}), ((4,), {4}), ((8,), {8}), ((1, 2), {1, 2})])
def test_budgets(budgets, all_of):
    config = consult.Config(budgets=budgets)
    env, tasks = consult.make(config), consult.make_tasks(config, n=200)
    assert set(tasks["budget"].tolist()) == all_of and env.max_turns == max(all_of)
    assert consult.prompt_length(config) <= 64
    first = env.observe(env.reset(KEY, {k: v[0] for k, v in tasks.items()}))
    assert BYTES.decode(first.tokens[0, : first.length[0]]) == f"D{tasks['budget'][0]}>"


def test_every_diagnosis_is_as_likely_on_both_sides():
    config = consult.Config()
    for held_out in (False, True):
        share = np.bincount(consult.make_tasks(config, n=2000, held_out=held_out)["diagnosis"], minlength=8) / 2000
        assert np.abs(share - 1 / 8).max() < 0.03


SHOWN = {"y": "abcdefghij", "n": "ABCDEFGHIJ", "u": "klmnopqrst"}
READ = {letter: (q, a) for a, letters in SHOWN.items() for q, letter in zip("abcdefghij", letters, strict=True)}


def demonstrated(**changes):
    """(left, [(question, answer)], move) of the samples of a demonstrator with changed settings."""
    taught = consult.demonstrations(consult.Config(**changes), 0, 3000)["doctor"]
    for ids, length, said, size in zip(*(taught[k] for k in ("tokens", "length", "completion", "completion_length"))):
        assert size == 2 and said[1] == BYTES.EOS
        shown = BYTES.decode(ids[:length])
        assert shown[0] == "D" and shown[-1] == ">"
        yield int(shown[1]), [READ[letter] for letter in shown[2:-1]], chr(said[0])


def test_demonstrators_err_as_often_as_the_settings_say():
    config = consult.Config()
    table, rows = consult.table(config).symptoms, list(demonstrated())
    last = [move for left, _, move in rows if left == 1]
    early = [(told, move) for left, told, move in rows if left > 1]
    assert abs(np.mean([m in consult.SYMPTOMS for m in last]) - config.overrun_rate) < 0.04
    assert abs(np.mean([m in consult.DIAGNOSES for _, m in early]) - config.hasty_rate) < 0.02
    again = [m in [entry[0] for entry in told] for told, m in early if told and m in consult.SYMPTOMS]
    assert abs(np.mean(again) - config.repeat_rate) < 0.03
    best = []
    for _, told, move in rows:
        if move in consult.DIAGNOSES:
            known = {entry for entry in told if entry[1] != "u"}
            agrees = [sum(row["abcdefghij".index(q)] == "ny".index(a) for q, a in known) for row in table]
            best.append(agrees["STUVWXYZ".index(move)] == max(agrees))
    assert 1 - config.misdiagnosis_rate <= np.mean(best) < 1 - config.misdiagnosis_rate / 2  # a mistake may tie
    good = demonstrated(misdiagnosis_rate=0.0, repeat_rate=0.0, overrun_rate=0.0, hasty_rate=0.0)
    for left, told, move in good:
        assert (move in consult.DIAGNOSES) == (left == 1) and move not in [entry[0] for entry in told]


def test_demonstrations_are_of_training_patients(monkeypatch):
    """Prompts show a part of a patient's answers, so the patients themselves are looked at."""
    drawn, patients = consult.drawn, []
    monkeypatch.setattr(consult, "drawn", lambda *args: patients.append(drawn(*args)) or patients[-1])
    consult.demonstrations(consult.Config(), 0, 400)
    assert len(patients) > 80 and not any(splits.is_held_out(consult.answer_text(p[1])) for p in patients)


BAD = [
    ({"budgets": (0, 6)}, r"config\.env\.args\.budgets: expected one or two numbers of turns in order, 1 to 8, got"),
    ({"budgets": (2, 9)}, r"config\.env\.args\.budgets: expected one or two .*, got \(2, 9\)"),
    ({"budgets": (6, 2)}, r"config\.env\.args\.budgets: .* got \(6, 2\)"),
    ({"budgets": (9,)}, r"config\.env\.args\.budgets: .* 1 to 8, got \(9,\)"),
    ({"budgets": (2, 4, 6)}, r"config\.env\.args\.budgets: .* got \(2, 4, 6\)"),
    ({"budgets": ()}, r"config\.env\.args\.budgets: .* got \(\)"),
    ({"noise": 1.5}, r"config\.env\.args\.noise: expected a probability in \[0, 1\], got 1\.5"),
    ({"table_seed": -1}, r"config\.env\.args\.table_seed: expected at least 0, got -1"),
    ({"protocol": "panel"}, r"config\.env\.args.*protocol"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("consult", bad).check("config.env")
    assert "\n" not in str(error.value)
