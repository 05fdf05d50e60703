"""Facts with the protocol mask: episodes against a slow twin, golden rewards, teams, demonstrations, bad input."""

import collections
import dataclasses
import re

import numpy as np
import pytest

from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import mask, mask_samples, pipeline, tasks
from jaxmarl_llm.envs.facts.mask import Settings
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.envs import test_facts
from tests.envs.test_facts import texts_of, twin_f1
from tests.envs.test_facts_inspection import play

BYTES = ByteTokenizer()
N = 128
ROLES = ("planner", "searcher", "summarizer", "updater", "answerer")
P, Q, S, U, G = ROLES
ORDER = (P, G, Q, S, U, G, Q)


def config(**settings):
    return facts.Config(protocol="mask", mask=Settings(**settings))


CONFIG = config()


# -- a slow twin, written from the docstring ---------------------------------------------------------------------------


class Twin:
    """An episode in plain Python, on lists of texts. Documents and quotes are those of the twin of `pipeline`."""

    def __init__(self, task, noise, settings):
        self.task, self.settings, self.turn = task, settings, 0
        self.read = test_facts.Twin(task, noise, settings.reading)
        self.steps, self.asked, self.answers = [], "", []

    @property
    def role(self):
        return ORDER[self.turn]

    def prompt(self):
        steps, asked = "".join(self.steps), self.task.question
        return {
            P: f"P{asked}>",
            G: f"G{steps}|{asked}>",
            Q: f"Q{steps}|{asked}>" if self.turn == 2 else f"Q{steps}|{asked}|{self.asked}>",
            S: f"S{''.join(self.read.documents)}|{asked}>",
            U: f"U{steps}|{asked}|{''.join(self.read.kept)}>",
        }[self.role]

    def act(self, said, ended):
        """The rewards of a turn, each for the five roles, and whether the episode is over."""
        role, pay = self.role, {key: np.zeros(5) for key in mask.COMPONENTS}
        own, over, found, score = np.arange(5) == ROLES.index(role), False, [], 0.0
        if role == P:
            good = bool(re.fullmatch("([a-z][0-9][a-z]){1,2}", said))
            score = float(ended and said[-1:] == self.task.answer)
            shown = re.sub("[^a-z0-9]", "?", said[:6], flags=re.S)
            self.steps = [(shown[i : i + 3] + "??")[:3] for i in range(0, len(shown), 3)]
        elif role == G:
            good, score = len(said) == 1, twin_f1(said, self.task.answer)
            self.answers.append((score, bool(ended and said == self.task.answer)))
        elif role == Q:
            ends = ended and said == "."
            over, good = ends or self.turn == 6, ends or (self.turn == 2 and self.read.rewrite(said))
            self.asked = re.sub("[^a-z0-9*,]", "?", said[:11], flags=re.S)
            found = [] if over else self.read.documents
        elif role == S:
            good = self.read.select(said, ended)
            found = self.read.kept
        else:
            good = said == "a" or said in [str(k + 1) for k in range(len(self.steps))]
            keep = self.steps if said == "a" or not (good and ended) else self.steps[: int(said) - 1]
            self.steps = [*keep, *self.read.kept]
            found = self.steps
        if over:
            pay["f1"] += self.answers[-1][0]
            pay["em"] += self.answers[-1][1]
        pay["score"] = own * score
        pay["evidence"] = own * np.mean([fact in found for fact in self.task.path])
        pay["format"], pay["turns"] = 1.0 * own * (ended and good), 1.0 * own
        pay["invalid"] = pay["format"] - pay["turns"]
        self.turn += 1
        return pay, over


# -- whole episodes ----------------------------------------------------------------------------------------------------


def completion(rng, twin):
    """A completion that is good, nearly right, or random; with or without an end."""
    role, asked, prompt = twin.role, twin.task.question, twin.prompt()
    read = re.findall("[a-z][0-9][a-z]", prompt.split("|")[0][1:]) or ["a1b"]
    pick = read[rng.integers(len(read))]
    some = {
        P: [asked[:2] + "x", asked[:2] + "xx1" + twin.task.answer, "a1xb2", "a1xb2cd3e", "1ab", "a"],
        G: [twin.task.answer, twin.task.answer + "x", pick[2], "", pick],
        Q: [
            asked[:2],
            asked[:2] + ",*" + asked[-1],
            asked[:2] + ",*" + asked[-1],
            asked[0],
            ".",
            "..",
            "a,b,c,d,e",
            "",
        ],
        S: [pick, ",".join(read[:2]), ",".join(read[:3]), "a1b", "", pick + "," + pick],
        U: [*"1122aa3", "", "11", "0", "b"],
    }[role]
    if rng.random() < 0.75:
        return some[rng.integers(len(some))], bool(rng.random() < 0.93)
    size, letters = rng.integers(13), "abcxyz123*,,.a" if rng.random() < 0.7 else "".join(map(chr, range(128)))
    text = "".join(letters[i] for i in rng.integers(len(letters), size=size))
    return text, bool(size < 12 and rng.random() < 0.9)


CONFIGS = {
    "as it is": CONFIG,
    "few": dataclasses.replace(
        config(documents=2, distractors=1, kept=1), entities=4, relations=3, two_hops=1.0, seed=3
    ),
    "all": dataclasses.replace(config(documents=5, distractors=0, kept=3), two_hops=0.2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_episodes_of_random_completions_are_those_of_a_slow_twin(name):
    """Roles, prompts, rewards and ends of every turn, whatever is written."""
    cfg, rng = CONFIGS[name], np.random.default_rng(0)
    rows, seen = facts.make_tasks(cfg, n=N), collections.Counter()
    twins, said, over = [Twin(*of, cfg.mask) for of in texts_of(rows)], [], np.zeros(N, bool)

    def speak(turn, roles, prompts):
        said[:] = [("", True) if done else completion(rng, twin) for done, twin in zip(over, twins)]
        return said

    for roles, prompts, active, pay, done in play(cfg, rows, speak):
        assert (active == ~over).all()
        for i, twin in enumerate(twins):
            got = {key: value[i] for key, value in pay.items()}
            if over[i]:
                assert done[i] and not any(value.any() for value in got.values())
                continue
            role, number = twin.role, len(twin.steps)
            assert ROLES[roles[i]] == role and prompts[i] == twin.prompt()
            assert len(prompts[i]) <= mask.prompt_length(cfg.mask) == facts.prompt_length(cfg)
            want, over[i] = twin.act(*said[i])
            off = {key for key in got if not np.allclose(got[key], want[key], atol=1e-6)}
            assert not off and bool(done[i]) == over[i], (off, prompts[i], said[i])
            seen.update((role, key) for key, value in want.items() if value.any())
            seen[role, "replaces"] += role == U and len(twin.steps) < number + len(twin.read.kept)
    assert over.all()
    assert min(seen[role, key] for role in ROLES for key in ("format", "invalid")) > 10
    assert min(seen[r, "score"] for r in (P, G)) > 5 and min(seen[r, "evidence"] for r in (Q, S, U)) > 5
    assert seen[U, "replaces"] > 10 and seen[Q, "f1"] > 5 and seen[Q, "em"] > 3
    env = facts.make(cfg)
    assert tuple(ROLES[who] for (who,) in env.actors) == ORDER and env.max_turns == len(ORDER) <= 8


# -- golden rewards ----------------------------------------------------------------------------------------------------


def team_of(script):
    """A team whose completions at each turn are ``script(task)``."""
    return lambda turn, task, prompt: script(task)[turn]


def mean_of(cfg, team, n=N):
    """Components of held-out episodes by turn and role: means over episodes. ``team(turn, task, prompt)`` -> text."""
    rows = facts.make_tasks(cfg, n=n, held_out=True)
    known = [task for task, _ in texts_of(rows)]
    speak = lambda turn, roles, prompts: [(team(turn, t, p), True) for t, p in zip(known, prompts)]
    turns = list(play(cfg, rows, speak))
    return {key: np.stack([pay[key].mean(0) for *_, pay, _ in turns]) for key in mask.COMPONENTS}


def test_golden_scores_of_an_episode():
    """F1 of the plan 0, of the answers 1 and 2/3; searches, summary and update have no score."""
    wrong = lambda task: next(x for x in "xy" if x != task.answer)
    script = lambda t: [t.question[:2] + wrong(t), t.answer, t.question[:2], "", "1", t.answer + "?", "."]
    got = mean_of(CONFIG, team_of(script))
    scores = got["score"].sum(1)
    np.testing.assert_allclose(scores, [0, 1, 0, 0, 0, 2 / 3, 0], atol=1e-6)
    assert not got["score"][:, 1:4].any()
    np.testing.assert_allclose(got["f1"], np.outer(np.arange(7) == 6, np.full(5, 2 / 3)), atol=1e-6)
    assert not got["em"].any()
    np.testing.assert_allclose(got["invalid"].sum(1), [0, 0, 0, 0, 0, -1, 0])


def test_a_first_search_that_ends_leaves_the_first_answer():
    got = mean_of(CONFIG, team_of(lambda t: ["a1b", t.answer, ".", *"...."]))
    assert (got["f1"][2] == 1).all() and not got["f1"][3:].any() and not got["turns"][3:].any()
    assert not got["invalid"].any() and not got["evidence"].any()


# -- teams -------------------------------------------------------------------------------------------------------------


def parts_of(prompt):
    read, *others = prompt[1:-1].split("|")
    return re.findall("...", read), others


def perfect(turn, task, prompt):
    read, others = parts_of(prompt)
    return {
        P: task.question[:2] + "x",
        G: pipeline.good_answer(task, read),
        Q: ",".join(pipeline.good_queries(task)) if turn == 2 else ".",
        S: ",".join(pipeline.good_quotes(task, read)),
        U: mask_samples.good_update(read, re.findall("...", "".join(others[-1:]))),
    }[ORDER[turn]]


def test_a_perfect_team_is_right_after_its_search():
    steps = []

    def team(turn, task, prompt):
        if turn == 5:
            steps.append(parts_of(prompt)[0] == [*task.path])
        return perfect(turn, task, prompt)

    got = mean_of(CONFIG, team)
    assert len(steps) == N and all(steps), "guessed steps have given way to the gold path"
    assert got["em"][6].mean() == got["f1"][6].mean() == 1 and not got["invalid"].any()
    assert (got["evidence"][[2, 3, 4], [1, 2, 3]] == 1).all() and got["score"][1, 4] < 0.2


@pytest.mark.parametrize("turn", [2, 3, 4, 5])
def test_each_role_of_the_round_can_spoil_the_answer(turn):
    """A search that asks for nothing, an empty summary, an update that drops it, a wrong answer: the steps matter."""
    spoilt = {2: "z", 3: "", 5: "?"}

    def team(now, task, prompt):
        read, _ = parts_of(prompt)
        if now == 5 and turn == 4:  # an answerer that follows the first step of the question that it finds
            first = [fact for fact in read if fact[:2] == task.question[:2]]
            return first[0][2] if first else "?"
        if now == 4 and turn == 4:
            return "a"
        return spoilt[now] if now == turn else perfect(now, task, prompt)

    got = mean_of(CONFIG, team)
    assert got["em"][6].mean() < 0.25


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def episodes(settings, n=2000):
    rng = np.random.default_rng(0)
    for _ in range(n):
        task, noise = tasks.drawn(rng, CONFIG), rng.permutation(tasks.FACTS).tolist()
        yield task, mask_samples.demonstrated(rng, settings, task, noise)


def test_demonstrators_err_as_often_as_the_settings_say():
    settings, wrong = CONFIG.mask, collections.defaultdict(list)
    for task, said in episodes(settings):
        (_, plan), (_, first), (_, closing) = said[0][0], *said[1]
        assert re.fullmatch("([a-l][1-6][a-l]){1,2}", plan) and len(plan) == 3 * len(task.path)
        wrong["plan"].append(plan[:2] != task.question[:2])
        wrong["end"] += [first == ".", closing != "."]
        if len(task.path) == 2 and first != ".":
            wrong["hop"].append("," not in first)
        prompt, quotes = said[2][0]
        documents, _ = parts_of(prompt)
        if len(documents) > 1 and task.path[0] in documents:
            wrong["selection"].append(quotes.split(",") != [f for f in task.path if f in documents])
        prompt, update = said[3][0]
        steps, others = parts_of(prompt)
        wrong["update"].append(update != mask_samples.good_update(steps, re.findall("...", others[-1])))
        prompt, answer = said[4][1]
        if task.path[-1] in parts_of(prompt)[0]:
            wrong["answer"].append(answer != task.answer)
    share = {key: np.mean(values) for key, values in wrong.items()}
    assert abs(share["plan"] - settings.plan_error_rate) < 0.03
    assert abs(share["end"] - settings.end_error_rate) < 0.02
    assert abs(share["hop"] - settings.hop_error_rate) < 0.05
    assert settings.selection_error_rate / 2 < share["selection"] < settings.selection_error_rate + 0.02
    assert settings.update_error_rate / 2 < share["update"] < settings.update_error_rate
    assert abs(share["answer"] - settings.answer_error_rate) < 0.03


def test_prompts_of_demonstrations_are_those_of_the_environment():
    """Episodes of demonstrators, played again in the environment: the same roles, prompts and ends."""
    for name in ("as it is", "all"):
        cfg = CONFIGS[name]
        cfg = dataclasses.replace(cfg, mask=dataclasses.replace(cfg.mask, end_error_rate=0.0))
        rows, rng = facts.make_tasks(cfg, n=N), np.random.default_rng(1)
        played = [mask_samples.demonstrated(rng, cfg.mask, t, noise.tolist()) for t, noise in texts_of(rows)]
        left, ends = [[list(turns) for turns in said] for said in played], np.zeros(N, bool)

        def speak(turn, roles, prompts, left=left):
            out = []
            for own, role, prompt in zip(left, roles, prompts):
                asked, said = own[role].pop(0)
                assert asked == prompt
                out.append((said, True))
            return out

        for *_, done in play(cfg, rows, speak):
            ends = done & [not any(own) for own in left]
        assert ends.all()


def test_samples_fit_their_columns_and_show_both_turns_of_a_role():
    d = facts.demonstrations(dataclasses.replace(CONFIG, copying=0.0), 0, 600)
    assert [*d] == [*ROLES]
    texts = {}
    for role, rows in d.items():
        texts[role] = [BYTES.decode(p[:n]) for p, n in zip(rows["tokens"], rows["length"], strict=True)]
        last = rows["completion"][np.arange(600), rows["completion_length"] - 1]
        assert (last == BYTES.EOS).all() and rows["completion_length"].max() <= 12
    assert 0.4 < np.mean([text.count("|") == 2 for text in texts[Q]]) < 0.6


def test_rewards_that_a_record_has_of_its_own_turn():
    """The weight of a malformed completion is the recipe's; every other weight of the record comes from credit."""
    got = mean_of(CONFIG, team_of(lambda t: ["?"] * 7))
    weighed = np.asarray(scalarise(got, {"invalid": 0.5}))
    np.testing.assert_allclose(weighed.sum(1), [-0.5, 0, -0.5, -0.5, -0.5, 0, -0.5])


BAD = [
    ({"documents": 0}, r"config\.env\.args\.mask\.documents: expected 1 to 12, got 0"),
    ({"distractors": 6}, r"config\.env\.args\.mask\.distractors: expected 0 to 5, got 6"),
    ({"kept": 4}, r"config\.env\.args\.mask\.kept: expected 1 to 3, got 4"),
    ({"end_error_rate": 1.5}, r"config\.env\.args\.mask\.end_error_rate: expected a probability"),
    ({"update_error_rate": -0.1}, r"config\.env\.args\.mask\.update_error_rate: expected a probability"),
    ({"rounds": 2}, r"config\.env\.args\.mask.*rounds"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("facts", {"protocol": "mask", "mask": bad}).check("config.env")
    assert "\n" not in str(error.value)
