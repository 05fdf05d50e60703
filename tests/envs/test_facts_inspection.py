"""Facts with an inspector: episodes against a slow twin, golden rewards, who acts, teams, demonstrations, bad input."""

import collections
import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest

from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import inspection, inspection_samples, tasks
from jaxmarl_llm.envs.facts.inspection import Settings
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.recipes import prisma
from tests.envs.facts_episodes import encode, program, texts_of
from tests.envs.test_facts import R, twin_search

BYTES = ByteTokenizer()
N = 128
ROLES = ("planner", "solver", "inspector")
P, S, I = ROLES


def config(**settings):
    return facts.Config(protocol="inspect", inspect=Settings(**settings))


CONFIG = config()


# -- a slow twin, written from the docstring ---------------------------------------------------------------------------


class Twin:
    """An episode in plain Python, on lists of texts. Completions are texts, with whether they have an eos."""

    def __init__(self, task, settings):
        self.task, self.settings, self.role = task, settings, P
        self.ran, self.asked = [], []  # queries since the last rewrite: those that ran, and as they were written
        self.said, self.answers, self.used = "", [], 0

    def found(self):
        every = [fact for results in twin_search(self.task.facts, self.ran) for fact in results]
        return list(dict.fromkeys(every))[: self.settings.documents]

    def prompt(self):
        if self.role == I and not self.settings.trace:
            return f"I{self.task.question}>"
        parts = ["".join(self.found()), self.task.question]
        if self.role == I:
            parts += [",".join(text for text in self.asked if text), self.said]
        return self.role[0].upper() + "|".join(parts) + ">"

    def act(self, said, ended):
        """The rewards of a turn, each for the three roles, and whether the episode is over."""
        role, pay = self.role, {key: np.zeros(3) for key in inspection.COMPONENTS}
        own, over, first = np.arange(3) == ROLES.index(role), False, len(self.answers) == 1
        if role == P:
            parts = said.split(",")
            good = len(parts) <= 4 and len(said) <= 11 and all(re.fullmatch("[a-z0-9*]{1,2}", q) for q in parts)
            self.ran += parts[:4]
            self.asked.append(re.sub("[^a-z0-9*,]", "?", said[:11]))
            pay["evidence"] = own * np.mean([fact in self.found() for fact in self.task.path])
            self.role = S
        elif role == S:
            good = len(said) == 1
            self.said = re.sub("[^a-z0-9]", "?", said[:2])
            self.answers.append(bool(ended and said == self.task.answer))
            if len(self.answers) == 1:
                pay["before"] += self.answers[0]
            self.role, over = I, self.used == self.settings.interventions
        else:
            good = said in ("p", "w", "e", "r")
            over = not ended or said not in ("w", "e", "r")
            if over:
                pay["passed_right"] += first and self.answers[0]
            else:
                self.used += 1
                pay["interventions"][2] = 1
                self.role = S if said == "r" else P
                if said == "w":
                    self.ran, self.asked = [], []
        if over:
            pay["em"] += self.answers[-1]
            pay["change"][2] = self.answers[-1] - self.answers[0]
        pay["format"], pay["turns"] = 1.0 * own * (ended and good), 1.0 * own
        return pay, over


# -- whole episodes ----------------------------------------------------------------------------------------------------


def play(cfg, rows, speak):
    """Episodes turn by turn: roles, prompts, who is active, rewards, ends. ``speak(turn, roles, prompts)``."""
    begin, observe, step = program(cfg)
    state = begin(rows)
    for turn in range(facts.make(cfg).max_turns):
        seen = jax.device_get(observe(state))
        prompts = [BYTES.decode(ids[0, : n[0]]) for ids, n in zip(seen.tokens, seen.length)]
        said = speak(turn, seen.role[:, 0], prompts)
        state, pay, done = jax.device_get(step(state, *encode(said, R)))
        yield seen.role[:, 0], prompts, seen.active[:, 0], pay, done


def completion(rng, role, twin):
    """A completion that is good, nearly right, or random; with or without an end."""
    asked, found = twin.task.question, twin.found() or ["a1b"]
    pick = found[rng.integers(len(found))]
    some = {
        P: [asked[:2], asked[:2] + ",*" + asked[-1], asked[0], "*" + asked[-1], pick[2] + asked[-1], "a,b,c,d,e", ""],
        S: [twin.task.answer, twin.task.answer, pick[2], pick[2], pick, "", "?"],
        I: [*"wwweeerrrp", "", "pp", "x"],
    }[role]
    if rng.random() < 0.75:
        return some[rng.integers(len(some))], bool(rng.random() < 0.93)
    size, letters = rng.integers(13), "abcxyz123*,,we" if rng.random() < 0.7 else "".join(map(chr, range(128)))
    text = "".join(letters[i] for i in rng.integers(len(letters), size=size))
    return text, bool(size < 12 and rng.random() < 0.9)


CONFIGS = {
    "two": CONFIG,
    "one": config(interventions=1),
    "few": dataclasses.replace(config(documents=2), entities=4, relations=3, two_hops=1.0, seed=3),
    "blind": config(trace=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_episodes_of_random_completions_are_those_of_a_slow_twin(name):
    """Roles, prompts, rewards and ends of every turn, whatever is written; and only roles of `actors` act."""
    cfg, rng = CONFIGS[name], np.random.default_rng(0)
    rows, seen, turns = facts.make_tasks(cfg, n=N), collections.Counter(), collections.defaultdict(set)
    twins, said, over = [Twin(task, cfg.inspect) for task in texts_of(rows)], [], np.zeros(N, bool)

    def speak(turn, roles, prompts):
        said[:] = [completion(rng, twin.role, twin) for twin in twins]
        return said

    for turn, (roles, prompts, active, pay, done) in enumerate(play(cfg, rows, speak)):
        assert (active == ~over).all()
        for i, twin in enumerate(twins):
            got = {key: value[i] for key, value in pay.items()}
            if over[i]:
                assert done[i] and not any(value.any() for value in got.values())
                continue
            role = twin.role
            assert ROLES[roles[i]] == role and prompts[i] == twin.prompt()
            assert len(prompts[i]) <= facts.prompt_length(cfg)
            turns[turn].add(int(roles[i]))
            want, over[i] = twin.act(*said[i])
            off = {key for key in got if not np.allclose(got[key], want[key], atol=1e-6)}
            assert not off and bool(done[i]) == over[i], (off, prompts[i], said[i])
            seen.update((role, key) for key, value in want.items() if value.any())
            seen[role, "below"] += want["change"][2] < 0
            seen[role, "read"] += len(twin.found())
    assert over.all()
    assert tuple(tuple(sorted(turns[turn])) for turn in sorted(turns)) == facts.make(cfg).actors
    assert min(seen[role, "format"] for role in ROLES) > 50 and min(seen[r, "em"] for r in (S, I)) > 5
    assert seen[S, "change"] > 5 and seen[S, "below"] > 2 and seen[I, "passed_right"] > 2 and seen[P, "evidence"] > 50


def test_turns_of_an_episode():
    assert inspection.actors(1) == ((0,), (1,), (2,), (0, 1), (1,))
    assert inspection.actors(2) == ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2), (0, 1), (1,))
    assert [facts.make(config(interventions=n)).max_turns for n in (1, 2)] == [5, 8]


# -- golden numbers ----------------------------------------------------------------------------------------------------


def paid(cfg, script):
    """Rewards of the inspector and of all components [T A], of one episode. ``script(task)``: completions."""
    rows = {k: v[:1].repeat(N, axis=0) for k, v in facts.make_tasks(cfg, n=1, held_out=True).items()}
    words = script(texts_of(rows)[0])
    turns = list(play(cfg, rows, lambda turn, *_: [(words[turn] if turn < len(words) else "", True)] * N))
    assert turns[len(words) - 1][4].all() and (len(words) < 2 or not turns[len(words) - 2][4].any())
    rewards = {key: np.stack([pay[key][0] for *_, pay, _ in turns]) for key in inspection.COMPONENTS}
    return np.asarray(scalarise(rewards, prisma.Config().reward))[2:, 2].sum(), rewards


answer_of = lambda task, right: task.answer if right else next(x for x in "xy" if x != task.answer)
plan_of = lambda task: ",".join(inspection_samples.next_queries(task, []))


@pytest.mark.parametrize("letter", "wer")
@pytest.mark.parametrize("before, after, want", [(0, 1, 0.95), (1, 1, -0.05), (1, 0, -1.05), (0, 0, -0.05)])
def test_golden_rewards_of_an_intervention(letter, before, after, want):
    """EM after - EM before - .05, by the weights of PRISMA; planner and solver are paid nothing behind the answer."""

    def script(task):
        again = [] if letter == "r" else [plan_of(task)]
        return [plan_of(task), answer_of(task, before), letter, *again, answer_of(task, after)]

    value, rewards = paid(config(interventions=1), script)
    assert value == pytest.approx(want, abs=1e-6)
    weighed = np.asarray(scalarise(rewards, prisma.Config().reward))
    assert weighed[1, :2].tolist() == [before, before] and not weighed[2:, :2].any()
    assert rewards["em"].sum(0).tolist() == [after] * 3 and rewards["before"].sum(0).tolist() == [before] * 3


@pytest.mark.parametrize("said", ["p", "", "?", "rr"])
@pytest.mark.parametrize("right", [1, 0])
def test_golden_rewards_of_a_pass(said, right):
    """A pass earns 0, and so does a malformed completion, which counts as one."""
    value, rewards = paid(CONFIG, lambda task: [plan_of(task), answer_of(task, right), said])
    assert value == 0 and rewards["passed_right"].sum(0).tolist() == [right] * 3
    assert rewards["format"][2].tolist() == [0, 0, said == "p"]


def test_two_interventions_cost_twice():
    """An inspector that passes after one intervention leaves the next one unused."""
    words = lambda *letters: lambda task: [
        plan_of(task), answer_of(task, 0), *itertools.chain(*((x, answer_of(task, 1)) for x in letters)),
    ]  # fmt: skip
    assert paid(CONFIG, words("r", "r"))[0] == pytest.approx(0.9, abs=1e-6)
    assert paid(CONFIG, lambda task: [*words("r")(task), "p"])[0] == pytest.approx(0.95, abs=1e-6)


# -- teams -------------------------------------------------------------------------------------------------------------


def mean_of(cfg, team, n=N):
    """Components of held-out episodes: sums over turns, means over roles. ``team(role, task, prompt)`` -> text."""
    rows = facts.make_tasks(cfg, n=n, held_out=True)
    known = texts_of(rows)
    speak = lambda turn, roles, prompts: [(team(ROLES[r], t, p), True) for r, t, p in zip(roles, known, prompts)]
    turns = list(play(cfg, rows, speak))
    return {key: float(sum(pay[key].mean() for *_, pay, _ in turns)) for key in inspection.COMPONENTS}


def parts_of(prompt):
    """Facts, and the other parts of a prompt."""
    found, *others = prompt[1:-1].split("|")
    return re.findall("...", found), others


def perfect(role, task, prompt):
    found, others = parts_of(prompt)
    if role == P:
        return ",".join(inspection_samples.next_queries(task, found))
    if role == S:
        return inspection_samples.good_answer(task, found)
    return inspection_samples.good_verdict(task, found, others[-1])


def test_a_perfect_team_is_right_at_once_and_passes():
    got = mean_of(CONFIG, perfect)
    assert got["em"] == got["before"] == got["passed_right"] == 1 and got["interventions"] == got["change"] == 0


def test_a_perfect_inspector_repairs_a_planner_that_forgets_the_second_hop():
    """The expansion brings the second hop, because the planner reads the first one. Without trace none would know."""

    def forgetful(role, task, prompt):
        return task.question[:2] if role == P and not parts_of(prompt)[0] else perfect(role, task, prompt)

    got = mean_of(CONFIG, forgetful)
    assert got["em"] == 1 and got["before"] < 0.7 and got["passed_right"] == got["before"]
    assert 3 * got["interventions"] == pytest.approx(1 - got["before"], abs=1e-6)


def test_always_and_never_intervening_earn_less_than_a_perfect_inspector():
    """Constant letters, with a solver that errs every second time."""
    rng = np.random.default_rng(0)

    def team(letter):
        def play_role(role, task, prompt):
            if role == S and rng.random() < 0.5:
                return "?"
            return letter if role == I and letter else perfect(role, task, prompt)

        return play_role

    worth = {}
    for letter in ("", *"pwer"):
        got = mean_of(CONFIG, team(letter))
        worth[letter] = 3 * (got["change"] - 0.05 * got["interventions"])  # the inspector is one of three roles
    assert worth["p"] == 0 and worth[""] > 0.25 and max(worth[x] for x in "pwer") < worth[""] - 0.1


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def episodes(settings, n=2000):
    rng = np.random.default_rng(0)
    drawn = [tasks.drawn(rng, CONFIG) for _ in range(n)]
    return [(task, inspection_samples.demonstrated(rng, settings, task)) for task in drawn]


def test_demonstrators_err_as_often_as_the_settings_say():
    settings = CONFIG.inspect
    share = lambda values: float(np.mean([*values]))
    played = episodes(settings)
    first = [(task, said[0][0][1].split(",")) for task, said in played]
    assert abs(share(q[0] != task.question[:2] for task, q in first) - settings.query_error_rate) < 0.03
    hops = [len(q) == 1 for task, q in first if len(task.path) == 2]
    assert abs(share(hops) - settings.hop_error_rate) < 0.04
    wrong, off, letters = [], [], collections.Counter()
    for task, said in played:
        for prompt, answer in said[1]:
            found, _ = parts_of(prompt)
            if task.path[-1] in found:
                wrong.append(answer != task.answer)
        for prompt, letter in said[2]:
            found, others = parts_of(prompt)
            assert others[0] == task.question
            off.append(letter != inspection_samples.good_verdict(task, found, others[-1]))
            letters[letter] += 1
    assert abs(share(wrong) - settings.answer_error_rate) < 0.03
    assert abs(share(off) - settings.verdict_error_rate) < 0.03
    assert min(letters[x] for x in "pwer") > 0.1 * sum(letters.values())


def test_prompts_of_demonstrations_are_those_of_the_environment():
    """Episodes of demonstrators, played again in the environment: the same roles, prompts and ends."""
    for cfg in (CONFIG, CONFIGS["few"], CONFIGS["blind"]):
        rows = facts.make_tasks(cfg, n=N)
        rng = np.random.default_rng(1)
        played = [inspection_samples.demonstrated(rng, cfg.inspect, task) for task in texts_of(rows)]
        left, ends = [[list(turns) for turns in said] for said in played], np.zeros(N, bool)

        def speak(turn, roles, prompts, left=left):
            out = []
            for own, role, prompt in zip(left, roles, prompts):
                asked, said = own[role].pop(0) if own[role] else (prompt, "")
                assert asked == prompt
                out.append((said, True))
            return out

        for *_, done in play(cfg, rows, speak):
            ends = done & [not any(own) for own in left]
        assert ends.all()


def test_samples_fit_their_columns_and_show_every_kind_of_turn():
    """No completion is longer than a rollout may write, and planners also read what was found."""
    for cfg in (CONFIG, CONFIGS["blind"]):
        d = facts.demonstrations(dataclasses.replace(cfg, copying=0.0), 0, 600)
        assert [*d] == [*ROLES]
        texts = {}
        for role, rows in d.items():
            texts[role] = [BYTES.decode(p[:n]) for p, n in zip(rows["tokens"], rows["length"], strict=True)]
            last = rows["completion"][np.arange(600), rows["completion_length"] - 1]
            assert (last == BYTES.EOS).all() and rows["completion_length"].max() <= 12
        expands = np.mean([not text.startswith("P|") for text in texts[P]])
        assert 0.05 < expands < 0.4
        assert all(re.fullmatch("I[a-l][1-6]{1,2}>", text) for text in texts[I]) == (not cfg.inspect.trace)


def test_the_control_differs_in_what_the_inspector_reads_alone():
    """Planner and solver have the same demonstrations; so do inspectors, but for their prompts."""
    one, other = (facts.demonstrations(dataclasses.replace(c, copying=0.5), 3, 200) for c in (CONFIG, CONFIGS["blind"]))
    for role in ROLES:
        for key in one[role]:
            same = np.array_equal(one[role][key], other[role][key])
            assert same == (role != I or key.startswith("completion")), (role, key)


BAD = [
    ({"documents": 0}, r"config\.env\.args\.inspect\.documents: expected 1 to 12, got 0"),
    ({"interventions": 3}, r"config\.env\.args\.inspect\.interventions: expected 1 to 2, got 3"),
    ({"interventions": 0}, r"config\.env\.args\.inspect\.interventions: expected 1 to 2, got 0"),
    ({"verdict_error_rate": 1.5}, r"config\.env\.args\.inspect\.verdict_error_rate: expected a probability"),
    ({"hop_error_rate": -0.1}, r"config\.env\.args\.inspect\.hop_error_rate: expected a probability"),
    ({"trace": "no"}, r"config\.env\.args\.inspect\.trace: expected"),
    ({"memory": 1}, r"config\.env\.args\.inspect.*memory"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("facts", {"protocol": "inspect", "inspect": bad}).check("config.env")
    assert "\n" not in str(error.value)
