"""The protocol `refine` of facts: episodes against a slow twin, cuts, kept prefixes, demonstrations, bad input."""

import collections

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import refine, tasks, text_trace
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.envs.facts_episodes import encode, program, texts_of
from tests.envs.test_facts import twin_search

BYTES = ByteTokenizer()
R = refine.RESPONSE
N = 96
OF_ALL = ("em", "density")


def config(**changes):
    own = {name: changes.pop(name) for name in [*changes] if name in refine.Settings.__dataclass_fields__}
    return facts.Config(protocol="refine", refine=refine.Settings(**own), **changes)


CONFIG = config()


# -- a slow twin, written from the docstrings --------------------------------------------------------------------------


class Twin:
    """An episode in plain Python. Completions are texts, with whether they have an eos."""

    def __init__(self, task, settings):
        self.task, self.settings, self.turn, self.done = task, settings, 0, False
        self.most = min(8, 2 * settings.searches + 3)
        self.whole = settings.second == "whole"
        self.traces = [[[], None]]  # (segments as shown, answer); the last one grows
        self.role, self.cut_turns, self.kept = "actor", None, None

    def results(self, segments):
        return twin_search(self.task.facts, segments)

    def shown(self, trace):
        segments, answer = trace
        parts = [f"{q}:{''.join(found)}>" for q, found in zip(segments, self.results(segments))]
        return "".join(parts) + {None: "", "?": "?"}.get(answer, f"={answer}")

    def prompt(self):
        if self.role == "actor":
            return f"T{self.task.question}>{self.shown(self.traces[-1])}"
        return f"T{self.task.question}>{'>'.join(self.shown(t) for t in self.traces)}|"

    def evidence(self, segments):
        return [float(bool(set(found) & set(self.task.path))) for found in self.results(segments)]

    def act(self, said, ended):
        """Rewards of the role that acts, with those of all."""
        pay = dict.fromkeys(refine.COMPONENTS, 0.0) | {"turns": 1.0}
        if self.role == "actor":
            self.actor(said, ended, pay)
        else:
            self.refiner(said, ended, pay)
        self.turn += 1
        if self.done:
            segments, answer = self.kept
            pay["em"] = float(answer == self.task.answer)
            u = self.evidence(segments)
            pay["density"] = pay["em"] * (sum(u) / len(u) if u else 0.0)
        return pay

    def actor(self, said, ended, pay):
        segments, _ = trace = self.traces[-1]
        query = ended and len(said) in (1, 2) and all(c in "abcdefghijklmnopqrstuvwxyz0123456789*" for c in said)
        answer = ended and len(said) == 2 and said[0] == "=" and "a" <= said[1] <= "z"
        must = len(segments) == self.settings.searches or self.turn == self.most - (2 if self.whole else 1)
        pay["format"] = float(answer or (query and not must))
        if not answer and not must:
            segments.append(said if query else "?")
            pay["evidence"] = self.evidence(segments)[-1]
            return
        trace[1] = said[1] if answer else "?"
        if self.cut_turns is None and (not self.whole or len(self.traces) == 2):
            self.role = "refiner"
        elif self.whole:
            self.traces.append([[], None])
        else:
            self.done, self.kept = True, trace

    def refiner(self, said, ended, pay):
        (segments, answer), *_ = self.traces
        said = said if ended else "nothing"
        u = self.evidence(segments)
        pay["first_em"] = float(answer == self.task.answer)
        pay["first_miss"] = float(u.index(0.0) + 1 if 0.0 in u else 0)
        if self.whole:
            second = said == "2"
            begin = len(segments) + 1
            self.cut_turns = (0, begin) if second else (begin, self.turn)
            pay["cut"], pay["format"] = float(second), float(said in ("1", "2"))
            self.done, self.kept = True, self.traces[second]
        elif said in [str(k + 1) for k in range(len(segments))]:
            k = int(said)
            pay["cut"], pay["format"], self.cut_turns = float(k), 1.0, (k - 1, self.turn)
            self.traces, self.role = [[segments[: k - 1], None]], "actor"
        else:
            pay["format"], self.cut_turns = float(said == "y"), (0, 0)
            self.done, self.kept = True, self.traces[0]
        pay["dropped_from"], pay["dropped_to"] = map(float, self.cut_turns)


# -- whole episodes ----------------------------------------------------------------------------------------------------


def play(cfg, rows, speak):
    """Turns of episodes: what is seen, prompts, states before and after, rewards, ends.

    ``speak(turn, prompts)`` -> completions.
    """
    begin, observe, step = program(cfg)
    state = jax.device_get(begin(rows))
    for turn in range(cfg.refine.turns + 1):
        seen = jax.device_get(observe(state))
        prompts = [BYTES.decode(ids[0, : n[0]]) for ids, n in zip(seen.tokens, seen.length)]
        after, pay, done = jax.device_get(step(state, *encode(speak(turn, prompts), R)))
        yield seen, prompts, state, after, pay, done
        state = after


def some_segment(rng, task, prompt):
    """A completion that the role of ``prompt`` may well write, or a random one."""
    pick = lambda options: options[rng.integers(len(options))]
    if rng.random() < 0.15:
        text = "".join(pick("ab1=*?y2,") if rng.random() < 0.8 else chr(rng.integers(128)) for _ in range(R))
        text = text[: rng.integers(R + 1)]
        return text, bool(len(text) < R and rng.random() < 0.8)
    if prompt.endswith("|"):
        return pick("yy112233490="), True
    queries = [
        task.question[:2],
        task.question[0],
        "*" + task.question[-1],
        task.facts[rng.integers(12)][:2],
        "*",
        "zz",
    ]
    if rng.random() < 0.6:
        return pick(queries), True
    return pick([f"={task.answer}", f"={task.answer}", "=a", "=", "=A", "=1", "x"]), True


CONFIGS = {
    "cut": CONFIG,
    "cut, four searches": config(searches=4, two_hops=1.0, entities=4, relations=3, seed=3),
    "cut, one search": config(searches=1),
    "whole": config(second="whole"),
    "whole, one search": config(searches=1, second="whole"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_episodes_of_random_completions_are_those_of_a_slow_twin(name):
    """Prompts, who acts, every reward and the end, whatever is written. Who may act at a turn is who does."""
    cfg, rng, seen = CONFIGS[name], np.random.default_rng(0), collections.Counter()
    rows, said = facts.make_tasks(cfg, n=N), {}
    twins = [Twin(task, cfg.refine) for task in texts_of(rows)]
    acts = [set() for _ in range(cfg.refine.turns)]

    def speak(turn, prompts):
        said[turn] = [some_segment(rng, twin.task, prompt) for twin, prompt in zip(twins, prompts)]
        return said[turn]

    for turn, (shown, prompts, _, _, pay, done) in enumerate(play(cfg, rows, speak)):
        for i, twin in enumerate(twins):
            got = {key: value[i] for key, value in pay.items()}
            assert bool(shown.active[i, 0]) != twin.done
            if twin.done:
                assert done[i] and not any(value.any() for value in got.values())
                continue
            role = refine.ROLES.index(twin.role)
            acts[turn].add(role)
            assert int(shown.role[i, 0]) == role
            assert prompts[i] == twin.prompt() and len(prompts[i]) <= refine.prompt_lengths(cfg.refine)[role]
            want = twin.act(*said[turn][i])
            own = np.arange(2) == role
            off = {k for k in got if not np.allclose(got[k], want[k] * (own | (k in OF_ALL)), atol=1e-6)}
            assert not off, (off, prompts[i], said[turn][i], got, want)
            assert bool(done[i]) == twin.done
            seen.update((twin.role if role == 0 else "judged", key) for key, value in want.items() if value)
            seen["ended without an answer"] += twin.done and twin.kept[1] == "?"
            seen["right after a cut"] += twin.done and role == 0 and want["em"] > 0
    assert all(twin.done for twin in twins)
    assert tuple(tuple(sorted(roles)) for roles in acts) == facts.make(cfg).actors
    paid = {key[1] for key in seen if len(key) == 2}
    assert paid == set(refine.COMPONENTS) - ({"dropped_from"} if name == "cut, one search" else set())
    assert seen["ended without an answer"] > 2 and (seen["right after a cut"] > 1 or cfg.refine.second == "whole")


def test_turns_that_are_left_after_a_cut():
    """The table of the docstring: T, and the turns left behind first traces of 1 to S searches."""
    left = lambda s, second: [s.turns - n - 2 for n in range(1, s.searches + 1)]
    for second in refine.FORMS:
        of = [refine.Settings(searches=s, second=second) for s in range(1, 5)]
        assert [s.turns for s in of] == [5, 7, 8, 8] and max(s.turns for s in of) <= 8
        assert left(of[2], second) == [5, 4, 3]
        assert [s.last_segment for s in of] == [s.turns - 1 - (second == "whole") for s in of]


# -- cuts --------------------------------------------------------------------------------------------------------------


def test_a_cut_puts_back_the_earlier_state_array_by_array():
    """The trace behind a cut before search k is the one before it, and so are the tokens of the prompt."""
    cfg, rng = CONFIGS["cut, four searches"], np.random.default_rng(1)
    rows = facts.make_tasks(cfg, n=N)
    known, before, cuts = texts_of(rows), [], collections.Counter()
    speak = lambda turn, prompts: [some_segment(rng, task, p) for task, p in zip(known, prompts)]
    pending = {}
    for turn, (seen, _, state, after, pay, _) in enumerate(play(cfg, rows, speak)):
        for i, k in pending.items():
            assert seen.tokens[i].tolist() == before[k - 1][0].tokens[i].tolist()
            assert seen.length[i] == before[k - 1][0].length[i]
        before.append((seen, state))
        at = np.flatnonzero(pay["cut"][:, refine.REFINER])
        pending = {i: int(pay["cut"][i, refine.REFINER]) for i in at}
        for i, k in pending.items():
            assert state.trace.number[i] == turn - 1  # a first trace has one search a turn
            for old, new in zip(jax.tree.leaves(before[k - 1][1].trace), jax.tree.leaves(after.trace), strict=True):
                np.testing.assert_array_equal(new[i], old[i])
            assert after.stage[i] == refine.SECOND and after.trace.number[i] == k - 1
        cuts.update(pending.values())
    assert min(cuts[k] for k in (1, 2, 3)) > 2, cuts


# -- teams -------------------------------------------------------------------------------------------------------------


def perfect_actor(prompt, task):
    searches = prompt.count(">") - 1
    if searches < len(task.path):
        return ("*" if searches else task.question[0]) + task.question[1 + searches]
    return f"={task.answer}"


def read_trace(prompt):
    """The first trace of a refiner's prompt."""
    *searches, answer = prompt.rstrip("|").split(">")[1:]
    pairs = [part.split(":") for part in searches]
    results = [[found[i : i + 3] for i in range(0, len(found), 3)] for _, found in pairs]
    return text_trace.TextTrace([query for query, _ in pairs], results, answer[-1])


def earned(cfg, actor, refiner, n=N):
    """Mean reward R of held-out episodes, and mean components."""
    rows = facts.make_tasks(cfg, n=n, held_out=True)
    known, sums = texts_of(rows), collections.Counter()
    of = lambda prompt, task: (refiner if prompt.endswith("|") else actor)(prompt, task)
    speak = lambda turn, prompts: [(of(p, t), True) for p, t in zip(prompts, known)]
    for _, _, _, _, pay, _ in play(cfg, rows, speak):
        for key, value in pay.items():
            sums[key] += float((value.max(1) if key in OF_ALL else value.sum(1)).mean())
    return sums["em"] + sums["density"], sums


def erring_actor(rng, settings):
    """The demonstrator, as an actor that reads its prompt alone."""

    def actor(prompt, task):
        mistakes = settings.searches, settings.relation_error_rate, settings.answer_error_rate
        said = text_trace.demonstrated_trace(rng, task, *mistakes).segments()
        searches = prompt.count(">") - 1
        if searches < len(said) - 1:
            return said[searches][1]
        last = prompt.rstrip(">")[-1]
        return f"={last}" if last.isalpha() and rng.random() > settings.answer_error_rate else f"={task.question[0]}"

    return actor


def good_refiner(prompt, task):
    k = text_trace.good_cut(task, read_trace(prompt))
    return str(k) if k else "y"


def test_a_perfect_team_earns_two():
    value, sums = earned(CONFIG, perfect_actor, good_refiner)
    assert [value, sums["cut"], sums["first_em"]] == pytest.approx([2, 0, 1])


def test_a_refiner_that_reads_helps_and_one_that_always_accepts_does_not():
    """With an actor that errs, a perfect refiner is worth more than accepting, and that more than cutting at random."""
    actor = lambda: erring_actor(np.random.default_rng(0), CONFIG.refine)
    good, sums = earned(CONFIG, actor(), good_refiner)
    accepts, once = earned(CONFIG, actor(), lambda p, t: "y")
    always, _ = earned(CONFIG, actor(), lambda p, t: "1")
    assert good > accepts + 0.2 and good > always + 0.2
    assert once["em"] == once["first_em"] and sums["em"] > sums["first_em"] + 0.1


DEGENERATE = {
    "no search": lambda p, t: f"={t.question[0]}",
    "a letter": lambda p, t: "=a",
    "one search, then the question": lambda p, t: t.question[:2] if p.count(">") == 1 else f"={t.question[0]}",
    "searches for ever": lambda p, t: t.question[:2],
    "nothing": lambda p, t: "",
    "the end of the entity's first fact": lambda p, t: t.question[0] if p.count(">") == 1 else f"={p[-2]}",
}


def test_degenerate_actors_earn_less_than_demonstrators():
    bar, _ = earned(CONFIG, erring_actor(np.random.default_rng(0), CONFIG.refine), lambda p, t: "y")
    assert 0.4 < bar < 1.2
    for name, actor in DEGENERATE.items():
        for refiner in (good_refiner, lambda p, t: "y", lambda p, t: "1"):
            safe = lambda p, t, refiner=refiner: refiner(p, t) if ":" in p and p[-2] != "?" else "y"
            assert earned(CONFIG, actor, safe)[0] < bar, name


# -- demonstrations ----------------------------------------------------------------------------------------------------


def demonstrated(cfg, n=2000):
    """Role -> (prompt, completion, last token) of demonstrations."""
    out = {}
    for role, d in facts.demonstrations(cfg, 0, n).items():
        rows = zip(*(d[k] for k in ("tokens", "length", "completion", "completion_length")), strict=True)
        out[role] = [(BYTES.decode(p[:n]), BYTES.decode(c[:m]), c[m - 1]) for p, n, c, m in rows]
    return out


def test_demonstrators_err_as_often_as_the_settings_say():
    cfg = config(copying=0.0)
    shown, settings = demonstrated(cfg), cfg.refine
    assert all(last == BYTES.EOS for rows in shown.values() for _, _, last in rows)
    share = lambda values: float(np.mean([*values]))
    actor = [(p.split(">")[0][1:], p.split(">")[1:-1], said) for p, said, _ in shown["actor"]]
    first = [(question, said) for question, trace, said in actor if not trace]
    assert abs(share(said != q[:2] for q, said in first) - settings.relation_error_rate) < 0.04
    assert all(said[0] == q[0] and said[1] in tasks.DIGITS for q, said in first)
    second = [(q, said) for q, trace, said in actor if len(trace) == 1 and len(q) == 3]
    assert abs(share(said != f"*{q[2]}" for q, said in second) - settings.relation_error_rate) < 0.05
    answers = [(trace[-1], said) for q, trace, said in actor if len(trace) == len(q) - 1]
    assert all(said[0] == "=" for _, said in answers)
    found = [said[1] != last.split(":")[1][2] for last, said in answers if not last.endswith(":")]
    assert abs(share(found) - settings.answer_error_rate) < 0.04
    judged = [(read_trace(p), said) for p, said, _ in shown["refiner"]]
    assert all(said in ["y", *(str(k + 1) for k in range(len(trace.queries)))] for trace, said in judged)
    accepts = share(said == "y" for _, said in judged)
    assert 0.2 < accepts < 0.6
    assert max(len(p) for p, *_ in shown["actor"]) <= refine.prompt_lengths(settings)[refine.ACTOR]


def test_a_refiner_demonstrates_good_cuts_but_for_its_mistakes():
    """Choices of a demonstrator at traces whose task is known."""
    cfg, rng, right = config(), np.random.default_rng(0), []
    for _ in range(1500):
        task = tasks.drawn(rng, cfg)
        trace = text_trace.demonstrated_trace(rng, task, 3, 0.3, 0.2)
        options = 1 + len(trace.queries)
        wrong = next((i + 1 for i, f in enumerate(trace.results) if not set(f) & set(task.path)), len(trace.queries))
        want = "y" if trace.answer == task.answer else str(wrong)
        said = refine.demonstrated_choice(rng, cfg.refine, task, trace)
        right.append((said == want) - (1 - 0.4 * (options - 1) / options))
    assert abs(np.mean(right)) < 0.04


def test_the_control_demonstrates_a_choice_of_two_traces():
    cfg = config(copying=0.0, second="whole")
    rows = demonstrated(cfg, 800)["refiner"]
    assert {said for _, said, _ in rows} == {"1", "2"}
    assert all(p.count("=") == 2 and p.endswith("|") for p, *_ in rows)
    assert max(len(p) for p, *_ in rows) <= refine.prompt_lengths(cfg.refine)[refine.REFINER]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_exercises_take_the_share_of_the_samples(share):
    for rows in demonstrated(config(copying=share), 1000).values():
        assert abs(np.mean([p[0] == "R" for p, *_ in rows]) - share) < 0.05


BAD = [
    ({"searches": 5}, r"config\.env\.args\.refine\.searches: expected 1 to 4, got 5"),
    ({"searches": 0}, r"config\.env\.args\.refine\.searches: expected 1 to 4, got 0"),
    ({"second": "half"}, r"config\.env\.args\.refine\.second: .*cut.*whole"),
    ({"relation_error_rate": 1.5}, r"config\.env\.args\.refine\.relation_error_rate: expected a probability"),
    ({"judgement_error_rate": -0.1}, r"config\.env\.args\.refine\.judgement_error_rate: expected a probability"),
    ({"penalties": 1}, r"config\.env\.args\.refine.*penalties"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("facts", {"protocol": "refine", "refine": bad}).check("config.env")
    assert "\n" not in str(error.value)
