"""The protocol `tags` of facts: episodes against a slow twin, one sequence of tokens, demonstrations, bad input."""

import collections

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import exercises, tags, tasks
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.envs.facts_episodes import encode, program, texts_of
from tests.envs.test_facts import twin_search

BYTES = ByteTokenizer()
R = 14
N = 128
ROLES = ("planner", "searcher", "answerer", "agent")
MARK = dict(zip(ROLES, "DLWG", strict=True))
QUERY = set("abcdefghijklmnopqrstuvwxyz0123456789*")


def config(**settings):
    return facts.Config(protocol="tags", tags=tags.Settings(**settings))


AGENT, TEAM = config(), config(players="team")


class Twin:
    """An episode in plain Python, written from the docstring. Completions are texts, with whether they have an eos."""

    def __init__(self, task, settings):
        self.task, self.settings, self.done = task, settings, False
        self.team = settings.players == "team"
        self.role = "planner" if self.team else "agent"
        self.text, self.asked, self.plans, self.planned = task.question + ">", [], 0, 0

    def prompt(self):
        return MARK[self.role] + self.text

    def kind(self, said, ended):
        """P, S or A of a segment of the grammar, else nothing."""
        tag, queries = said[:1], said[1:].split(",")
        clean = all(len(q) in (1, 2) and set(q) <= QUERY for q in queries)
        good = {
            "P": clean and len(queries) <= self.settings.searches and self.plans < self.settings.plans,
            "S": clean and len(queries) == 1 and len(self.asked) < self.settings.searches,
            "A": len(said) == 2 and "a" <= said[1] <= "z",
        }
        may = {"planner": "P", "searcher": "S", "answerer": "A", "agent": "PSA"}[self.role]
        return tag if ended and tag and tag in may and good[tag] else ""

    def act(self, said, ended):
        """Rewards of the role that acts."""
        pay, kind = dict.fromkeys(tags.COMPONENTS, 0.0) | {"turns": 1.0}, self.kind(said, ended)
        self.text += said + "/"
        if kind == "P":
            self.plans += 1
            self.planned = len(said.split(","))
        elif kind == "S":
            self.asked.append(said[1:])
            found = twin_search(self.task.facts, self.asked)[-1]
            self.text += "".join(found) + ">"
            self.planned -= 1
            pay |= {"searches": 1.0, "evidence": float(bool(set(found) & set(self.task.path)))}
        else:
            self.done = True
            pay["format"] = float(kind == "A")
            pay["em"] = float(kind == "A" and said[1] == self.task.answer)
        if self.team:
            self.role = "searcher" if self.planned > 0 else "answerer"
        return pay


def shown(tokens, length):
    """Tokens as text; eos is /."""
    return "".join("/" if t == BYTES.EOS else chr(t) for t in tokens[:length].tolist())


def play(cfg, rows, speak, width=R):
    """Turns of the episodes of ``rows``: (number, role, prompt, completion, its length, rewards, done) of the array
    form. ``speak``: (turn, prompts of all episodes) -> completions with whether they have an eos.
    """
    reset, observe, step = program(cfg)
    state, count = reset(rows), len(rows["answer"])
    finished = np.zeros(count, bool)
    for turn in range(len(cfg.tags.actors)):
        seen = jax.device_get(observe(state))
        np.testing.assert_array_equal(seen.active[:, 0], ~finished)
        asked = [shown(tokens[0], size[0]) for tokens, size in zip(seen.tokens, seen.length, strict=True)]
        said, length = encode(speak(turn, asked), width)
        state, pay, done = jax.device_get(step(state, said, length))
        for i in np.flatnonzero(~finished):
            assert seen.role[i, 0] in cfg.tags.actors[turn]
            paid = {name: values[i] for name, values in pay.items()}
            yield i, ROLES[seen.role[i, 0]], asked[i], said[i], length[i, 0], paid, bool(done[i])
        assert all(not values[finished].any() for values in pay.values())
        finished = np.asarray(done)
    assert finished.all()


def babble(rng):
    """A completion that is often in the grammar of some role."""
    letter = lambda: "abcdefghijkl"[rng.integers(12)]
    query = lambda: [letter() + str(rng.integers(1, 7)), "*" + str(rng.integers(1, 7)), letter(), "*"][rng.integers(4)]
    kind = rng.integers(12)
    if kind < 4:
        return "P" + ",".join(query() for _ in range(rng.integers(1, 5)))
    if kind < 8:
        return "S" + query()
    if kind < 10:
        return "A" + letter()
    out = ["", "P", "S", "A", "Sa12", "S,", "Aab", "A1", "xa", "Pa1,", "SA", "S" + query() + ",", "?a"]
    return out[rng.integers(len(out))]


SPOKEN = {"planner": "P", "searcher": "S", "answerer": "A"}
FORMS = {
    "agent": AGENT,
    "team": TEAM,
    "two plans, one search": config(plans=2, searches=1),
    "four searches": config(searches=4),
    "team, one search": config(players="team", searches=1),
    "team, four searches": config(players="team", searches=4),
}


@pytest.mark.parametrize("form", FORMS)
def test_episodes_equal_the_twin(form):
    """Prompts, roles, rewards and ends, for completions that are often out of the grammar."""
    cfg, rng = FORMS[form], np.random.default_rng(3)
    rows = facts.make_tasks(cfg, seed=1, n=N)
    twins = [Twin(task, cfg.tags) for task in texts_of(rows)]
    seen = collections.Counter()

    def speak(turn, prompts):
        out = []
        for twin in twins:
            said = babble(rng)
            while rng.random() < 0.85 and not (twin.done or twin.kind(said, True)):
                said = babble(rng)
            out.append((said, rng.random() < 0.98))
        return out

    width = 24
    for i, role, prompt, said, length, pay, done in play(cfg, rows, speak, width):
        twin = twins[i]
        assert (role, prompt) == (twin.role, twin.prompt())
        ended = BYTES.EOS in said[:length]
        text = shown(said, length - ended)
        seen[twin.kind(text, ended) or "out"] += 1
        want = twin.act(text, ended)
        own = ROLES.index(role)
        for name in tags.COMPONENTS:
            for r in range(len(ROLES)):
                assert pay[name][r] == (want[name] if r == own or name in ("em", "format") else 0), (name, r)
        assert done == twin.done
        seen["right"] += int(want["em"])
    assert all(seen[kind] for kind in ("P", "S", "A", "out"))


def perfect(prompt, task):
    """The segment of a perfect role."""
    text = prompt[prompt.index(">") + 1 :]
    queries = [task.question[:2], *("*" + r for r in task.question[2:])]
    if not text:
        return "P" + ",".join(queries)
    done = text.count("S")
    return "S" + queries[done] if done < len(queries) else "A" + text[text.rindex(">") - 1]


@pytest.mark.parametrize("players", tags.PLAYERS)
def test_a_perfect_player_is_right_and_its_episode_is_one_sequence(players):
    """Token for token a prompt is the one before it, the completion behind it, and an observation."""
    cfg = {"agent": AGENT, "team": TEAM}[players]
    rows = facts.make_tasks(cfg, n=N)
    known, before, sums = texts_of(rows), {}, collections.Counter()
    speak = lambda turn, prompts: [(perfect(p, t), True) for p, t in zip(prompts, known, strict=True)]
    for i, _, prompt, said, length, pay, _ in play(cfg, rows, speak):
        if i in before:
            assert prompt[1:].startswith(before[i])
            assert prompt[1:].removeprefix(before[i])[-1:] in ("", ">")
        before[i] = prompt[1:] + shown(said, length)
        sums.update({name: values.max() for name, values in pay.items()})
    hops = sum(len(task.path) for task in known)
    assert sums["em"] == sums["format"] == N and sums["evidence"] == sums["searches"] == hops
    assert sums["turns"] == hops + 2 * N


def test_the_longest_sequence_fits_in_a_prompt():
    """A first character that three facts begin with, in every search; plans as long as they may be."""
    cfg = config(plans=2, searches=4)
    rows = facts.make_tasks(cfg, n=512)
    first = [collections.Counter(fact[0] for fact in task.facts).most_common(1)[0] for task in texts_of(rows)]
    assert sum(count >= 3 for _, count in first) > 100
    speak = lambda turn, prompts: [("P" + ",".join([c + "1"] * 4) if turn < 2 else "S" + c, True) for c, _ in first]
    longest = 0
    reset, observe, step = program(cfg)
    state = reset(rows)
    for turn in range(6):
        state, _, done = step(state, *encode(speak(turn, None), R))
        assert not done.any()
        longest = int(observe(state).length.max())
    assert longest == facts.prompt_length(cfg)


@pytest.mark.parametrize("copying", [0.0, 0.5])
def test_demonstrations_are_turns_with_mistakes(copying):
    """Prompts are those of the twin; the team errs less than the agent; exercises have their share."""
    cfg = facts.Config(protocol="tags", copying=copying)
    samples = facts.demonstrations(cfg, 5, 400)
    assert [*samples] == [*ROLES]
    right = collections.Counter()
    for role in ROLES:
        d, own = samples[role], 0
        for k in range(400):
            prompt = shown(d["tokens"][k], d["length"][k])
            said = shown(d["completion"][k], d["completion_length"][k])
            if prompt[0] == exercises.MARK:
                continue
            own += 1
            assert prompt[0] == MARK[role] and said[0] in SPOKEN.get(role, "PSA")
            assert said[-1] == "/" or len(said) == d["completion"].shape[1]
            question = prompt[1 : prompt.index(">")]
            if said[0] == "P":
                right[role] += said.strip("/") == "P" + ",".join([question[:2], *("*" + r for r in question[2:])])
                right[role, "all"] += 1
        assert abs(own / 400 - (1 - copying)) < 0.1
    assert right["planner"] / right["planner", "all"] > 0.45 > 0.3 > right["agent"] / right["agent", "all"]


def test_demonstrations_play_as_their_episodes():
    """The whole episode of a demonstrator without mistakes, said to the environment, gives the prompts of it."""
    cfg, rng = TEAM, np.random.default_rng(0)
    rows = facts.make_tasks(cfg, n=N)
    told = [tags.demonstrated(rng, cfg.tags, task, 0.0, 0.0, 0.0) for task in texts_of(rows)]
    speak = lambda turn, prompts: [(t[min(turn, len(t) - 1)][1], True) for t in told]
    turns = collections.Counter()
    for i, _, prompt, _, _, pay, done in play(cfg, rows, speak):
        assert prompt[1:] == told[i][turns[i]][0]
        turns[i] += 1
        assert not done or pay["em"][0] == 1
    assert [turns[i] for i in range(N)] == [len(t) for t in told]


def test_demonstrations_have_training_tasks_alone(monkeypatch):
    cfg = facts.Config(protocol="tags", copying=0.0)
    drawn, draw = [], tasks.drawn
    monkeypatch.setattr(tasks, "drawn", lambda rng, config: drawn.append(draw(rng, config)) or drawn[-1])
    tags.demonstrations(cfg, cfg.tags, 0, 64)
    assert len(drawn) == 64 and not any(splits.is_held_out(tasks.content(task)) for task in drawn)


BAD = [
    ({"players": "both"}, r"tags\.players: unknown value 'both'; choose from 'agent', 'team'"),
    ({"plans": 0}, r"tags\.plans: expected .*1.*2, got 0"),
    ({"searches": 5}, r"tags\.searches: expected .*1.*4, got 5"),
    ({"agent_error_rate": 1.5}, r"tags\.agent_error_rate: expected .*got 1\.5"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(args, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("facts", {"protocol": "tags", "tags": args}).build()
    assert "\n" not in str(error.value)
