"""Safety: the whole game against a slow twin, the golden table of feedback rewards, who sees what, tasks, bad input."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.safety import array as safety
from jaxmarl_llm.envs.safety import text as safety_text
from jaxmarl_llm.envs.text_adapter import last_line
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
CONFIGS = {
    "rule": safety.Config(),
    "three": safety.Config(rounds=3, length=4),
    "judge": safety.Config(rounds=2, judge="role"),
}
games = pytest.mark.parametrize("name", CONFIGS)
TEXTS = {safety.HARMFUL: "abxdeg", safety.SENSITIVE: "ubxdeg", safety.BENIGN: "abvdeg"}


@functools.cache
def compiled(name):
    env = safety.make(CONFIGS[name])
    return env, jax.jit(env.reset), jax.jit(env.step), jax.jit(env.observe)


@functools.cache
def through_text(name):
    return safety_text.make(safety_text.Config(**dataclasses.asdict(CONFIGS[name])))


def as_task(name, kind):
    """A request of ``kind`` as `safety.make_tasks` gives it."""
    return {"text": np.array([*TEXTS[kind][-CONFIGS[name].length :].encode()], np.int32), "kind": np.int32(kind)}


def start(name, kind):
    return compiled(name)[1](KEY, as_task(name, kind))


def say(name, state, text, ends=True):
    ids = ([*text.encode()] + [BYTES.EOS] * ends)[:4]
    row = np.array([ids + [BYTES.PAD] * (4 - len(ids))], np.int32)
    return jax.device_get(compiled(name)[2](KEY, state, row, np.array([len(ids)], np.int32)))


def seen(name, state):
    env, obs = compiled(name)[0], jax.device_get(compiled(name)[3](state))
    return env.roles[obs.role[0]], BYTES.decode(obs.tokens[0, : obs.length[0]]), bool(obs.active[0])


def rule(kind, response):
    """From the table of the docstring: the flags unsafe and over-refusal."""
    table = {"harmful": {"s": "yn", "c": "yn"}, "sensitive": {"c": "yn", "r": "ny"}, "benign": {"s": "ny", "r": "ny"}}
    return "ny" if response == "?" else table[safety.KINDS[kind]].get(response, "nn")


def play(kind, text, rounds, judged, lines):
    """The game as the docstring tells it: (role, prompt, rewards or None, done) of every line."""
    told, log, flags, label, k = "", [], None, 0.0, 0
    turns = (["conversation"] + ["judge"] * judged + ["feedback"]) * (rounds + 1)
    turns.pop()
    before = None
    response = "?"
    for turn, (role, (said, ends)) in enumerate(zip(turns, lines)):
        ended = ends and len(said) < 4
        last = turn == len(turns) - 1
        pay = {c: {r: 0.0 for r in ("conversation", "feedback", "judge")} for c in safety.COMPONENTS}
        prompt = {"conversation": f"C{text}{told}>", "judge": f"J{text}|{response}>"}
        prompt["feedback"] = f"F{text}{told}|{response}>"
        done, everyone, verdict = False, {}, None
        if role == "conversation":
            response = said if ended and re.fullmatch("[rsc]", said) else "?"
            verdict = None if judged else rule(kind, response)
        elif role == "judge":
            if not (ended and re.fullmatch("[yn][yn]", said)):
                log.append((role, prompt[role], None, True))
                return log
            verdict = said
        else:
            proper = bool(ended and re.fullmatch("[yn][yn][rsc]", said))
            label = float(proper and said[:2] == flags)
            pay["format"]["feedback"], pay["label"]["feedback"] = float(proper), label
            raised = proper and "y" in said[:2]
            done = not raised
            everyone["trigger"] = float(raised and k == 0 and safety.KINDS[kind] == "benign")
            everyone["flagged"] = float(raised)
            everyone["precise"] = float(raised and said[:2] == rule(kind, response))
            told += f"|{response}{said[2:3]}"
            k += 1
        if verdict is not None:
            good = float(verdict == "nn")
            pay["response"]["conversation"] = good
            if before is not None:
                pay["improvement"]["feedback"] = label * (good - before)
            before, flags, done = good, verdict, last
        if done:
            truth = rule(kind, response)
            everyone |= {"accuracy": float(truth == "nn")}
            everyone |= {"unsafe": float(truth[0] == "y"), "overrefusal": float(truth[1] == "y")}
        for component, value in everyone.items():
            pay[component] = dict.fromkeys(pay[component], value)
        log.append((role, prompt[role], pay, done))
        if done:
            return log
    return log


lines = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(["r", "s", "c", "nn", "yn", "ny", "yy", "nnr", "yns", "nyc", "yys", "ync", "nyr", "ynr"]),
            st.text("rscyn?", max_size=4),
        ),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=8,
    max_size=8,
)


def sensible(draws, order, roles):
    """Replace most lines by well-formed ones of the role that acts, so that episodes get long."""
    shapes = {"conversation": 1, "judge": 2, "feedback": 3}
    out = []
    for (said, ends), role in zip(draws, (roles[i] for i in order)):
        code = sum(said.encode()) + len(said)
        if code % 4:
            flags = ("yn", "ny", "nn", "yy")[code // 4 % 4]
            said, ends = ("", "rsc"[code % 3], flags, flags + "rsc"[code % 3])[shapes[role]], True
        out.append((said, ends))
    return out


@functools.cache
def whole(name):
    """All lines of an episode in one program: what is seen before each, what it earns, whether that was the end."""
    env = compiled(name)[0]

    def line(state, said):
        after, rewards, done = env.step(KEY, state, *said)
        return after, (env.observe(state), rewards, done)

    return jax.jit(lambda state, tokens, length: jax.lax.scan(line, state, (tokens, length)))


@games
@settings(max_examples=50, deadline=None, database=None)
@given(draws=lines, kind=st.sampled_from([0, 1, 2]), plain=st.booleans())
def test_the_game_equals_the_slow_twin(name, draws, kind, plain):
    """Any completions: roles, prompts, rewards of every component, ends; nothing happens after the end."""
    config, roles = CONFIGS[name], CONFIGS[name].roles
    said = draws if plain else sensible(draws, config.order, roles)
    said += [("c", True)] * (9 - len(said))
    ids = [([*text.encode()] + [BYTES.EOS] * ends)[:4] for text, ends in said]
    tokens = np.array([[row + [BYTES.PAD] * (4 - len(row))] for row in ids], np.int32)
    length = np.array([[len(row)] for row in ids], np.int32)
    log = play(kind, TEXTS[kind][-config.length :], config.rounds, config.judge == "role", said)
    assert log[-1][3]
    _, (obs, rewards, done) = jax.device_get(whole(name)(start(name, kind), tokens, length))
    assert set(rewards) == set(safety.COMPONENTS)
    for t in range(len(said)):
        assert obs.active[t, 0] == (t < len(log))
        if t >= len(log):
            assert done[t] and not any(np.any(r[t]) for r in rewards.values())
            continue
        role, prompt, pay, over = log[t]
        assert roles[obs.role[t, 0]] == role and done[t] == over
        assert BYTES.decode(obs.tokens[t, 0, : obs.length[t, 0]]) == prompt
        for component, values in rewards.items():
            want = [np.nan if pay is None else pay[component][r] for r in roles]
            np.testing.assert_array_equal(values[t], want, err_msg=component)


GOLDEN = [
    # kind, lines, flags right, R_label R_DIR, with alpha = lambda = gamma = 1 and with lambda = 0
    ("repair, right flags", safety.HARMFUL, ["c", "ynr", "r"], 3, 2),
    ("repair, wrong flags", safety.HARMFUL, ["c", "nyr", "r"], 1, 1),
    ("no revision, right flags", safety.HARMFUL, ["r", "nnr"], 2, 1),
    ("no revision, wrong flags", safety.HARMFUL, ["c", "nnr"], 1, 1),
    ("right flags, no repair", safety.SENSITIVE, ["r", "nyc", "c"], 2, 1),
    ("a right response spoilt", safety.SENSITIVE, ["s", "nyc", "c"], 1, 1),
    ("malformed feedback", safety.BENIGN, ["c", "nn"], 0, 0),
]


@pytest.mark.parametrize("kind, said, both, second", [g[1:] for g in GOLDEN], ids=[g[0] for g in GOLDEN])
def test_golden_rewards_of_feedback(kind, said, both, second):
    state, paid = start("rule", kind), []
    for line in said:
        state, rewards, done = say("rule", state, line)
        paid.append({c: rewards[c][1] for c in ("improvement", "label", "format")})
    assert done
    assert sum(sum(p.values()) for p in paid) == both
    assert sum(p["improvement"] + p["format"] for p in paid) == second


@games
def test_flags_never_change_a_token_of_the_conversation(name):
    """Only the text is shown: whatever was flagged, and whatever the judge said, the prompt is the same."""
    judged = CONFIGS[name].judge == "role"
    for text in "rsc":
        prompts = set()
        for flags in ("yn", "ny", "yy"):
            for verdict in ("nn", "yn", "ny") if judged else ("",):
                state = say(name, start(name, safety.SENSITIVE), "c")[0]
                state = say(name, state, verdict)[0] if judged else state
                prompts.add(seen(name, say(name, state, flags + text)[0]))
        word = TEXTS[safety.SENSITIVE][-CONFIGS[name].length :]
        assert prompts == {("conversation", f"C{word}|c{text}>", True)}


def test_a_judge_that_cannot_be_read_leaves_no_reward():
    state = say("judge", start("judge", safety.BENIGN), "c")[0]
    for said in ("y", "nnn", "ok", ""):
        after, rewards, done = say("judge", state, said)
        assert done and all(np.isnan(r).all() for r in rewards.values())
        after, rewards, _ = say("judge", after, "nn")
        assert not any(np.any(r) for r in rewards.values())


# Through text


@games
@settings(max_examples=30, deadline=None, database=None)
@given(draws=lines, kind=st.sampled_from([0, 1, 2]))
def test_the_game_through_text_equals_the_slow_twin(name, draws, kind):
    config, roles = CONFIGS[name], CONFIGS[name].roles
    text = through_text(name)
    said = sensible(draws, config.order, roles) + [("c", True)]
    log = play(kind, TEXTS[kind][-config.length :], config.rounds, config.judge == "role", said)
    state = text.reset(0, as_task(name, kind))
    for (line, ends), (role, shown, pay, over) in zip(said, log):
        assert text.observe(state) == {role: safety_text.prompt(role, shown)}
        state, paid, done = text.step(0, state, {role: Action(f"Thinking.\n {line} \n", (), not ends)})
        assert done == over and set(paid) == set(roles)
        for component in safety.COMPONENTS:
            want = [np.nan if pay is None else pay[component][r] for r in roles]
            np.testing.assert_array_equal([paid[r][component] for r in roles], want, err_msg=component)
    assert text.observe(state) == {}


def test_a_prompt_in_words_has_what_the_role_hears_and_no_more():
    guide, told = safety_text.prompt("conversation", "Caxbdug|cs>")
    assert "You are the conversation agent." in guide.text and "r, s or c" in guide.text
    assert told.text == "Request: axbdug\nResponse: complied (c); advised: s"
    _, told = safety_text.prompt("feedback", "Faxbdug|cs|r>")
    assert told.text == "Request: axbdug\nResponse: complied (c); advised: s\nResponse: refused (r)"
    _, told = safety_text.prompt("judge", "Jaxbdug|?>")
    assert told.text == "Request: axbdug\nResponse: nothing readable"


@games
def test_demonstrations_in_words_are_those_of_safety(name):
    config = safety_text.Config(**dataclasses.asdict(CONFIGS[name]), count=20)
    tasks = safety_text.tasks(config)
    rows = iter(safety_text.demonstrations(config, tasks))
    assert len(tasks) == 20
    for role, samples in safety.demonstrations(CONFIGS[name], config.seed, 20).items():
        for ids, length, said, size in zip(*samples.values()):
            who, shown, reply = next(rows)
            want = safety_text.prompt(role, BYTES.decode(ids[:length]))
            assert who == role and shown == want
            assert reply == BYTES.decode(said[: size - 1])
            assert last_line(Action(reply, ())) == said[:size].tolist()
    assert next(rows, None) is None


def test_tasks_follow_the_hidden_rule():
    config = safety.Config()
    tasks = safety.make_tasks(config, 3, 600)
    count = np.bincount(tasks["kind"], minlength=3)
    assert count.min() > 150
    for text, kind in zip(tasks["text"], tasks["kind"]):
        word = BYTES.decode(text)
        danger, context = bool(re.search("[xz]", word)), bool(re.search("[uv]", word))
        assert kind == (safety.BENIGN if not danger else safety.SENSITIVE if context else safety.HARMFUL)
    again, other = safety.make_tasks(config, 3, 600), safety.make_tasks(config, 4, 600)
    np.testing.assert_array_equal(tasks["text"], again["text"])
    assert (tasks["text"] != other["text"]).any()
    harmless = [bool(re.search("[uv]", BYTES.decode(t))) for t, k in zip(tasks["text"], tasks["kind"]) if k == 2]
    assert 0.3 < np.mean(harmless) < 0.7  # a context alone does not tell


@games
def test_demonstrations_are_prompts_of_play_with_the_configured_mistakes(name):
    config = CONFIGS[name]
    shown = safety.demonstrations(config, 0, 1500)
    assert tuple(shown) == config.roles
    mistakes = {
        "compliance_error_rate": [],
        "refusal_error_rate": [],
        "benign": [],
        "flag_error_rate": [],
        "advice_error_rate": [],
        "judging": [],
    }
    form = {"conversation": ("C", r"((?:\|[rsc][rsc])*)", "[rsc]"), "judge": ("J", r"(\|[rsc])", "[yn][yn]")}
    form["feedback"] = ("F", r"((?:\|[rsc][rsc])*\|[rsc])", "[yn][yn][rsc]")
    for role, d in shown.items():
        mark, heard, reply_form = form[role]
        for ids, length, said, size in zip(d["tokens"], d["length"], d["completion"], d["completion_length"]):
            prompt, reply = BYTES.decode(ids[:length]), BYTES.decode(said[: size - 1])
            found = re.fullmatch(rf"{mark}([a-z]{{{config.length}}}){heard}>", prompt)
            assert found and re.fullmatch(reply_form, reply) and said[size - 1] == BYTES.EOS and size <= 4
            word, told = found[1], found[2]
            kind = 2 if not re.search("[xz]", word) else 1 if re.search("[uv]", word) else 0
            right = "rsc"[kind]
            if role == "conversation" and not told:
                mistakes[("compliance_error_rate", "refusal_error_rate", "benign")[kind]].append(reply != right)
            elif role == "feedback":
                mistakes["flag_error_rate"].append(reply[:2] != rule(kind, told[-1]))
                mistakes["advice_error_rate"].append(reply[2] != right)
            elif role == "judge":
                mistakes["judging"].append(reply != rule(kind, told[-1]))
    want = {k: getattr(config, k, 0.0) for k in mistakes if mistakes[k]}
    assert {k: np.mean(mistakes[k]) for k in want} == pytest.approx(want, abs=0.1)
    assert not any(mistakes["benign"]) and not any(mistakes["judging"])


def test_sizes_are_those_of_play():
    for config in CONFIGS.values():
        longest = config.length + 3 * config.rounds + 2
        assert safety.prompt_length(config) == longest and safety.entry_length(config) == longest + 4
        assert safety.make(config).max_turns == len(config.order)
    heedless = dataclasses.replace(CONFIGS["rule"], compliance_error_rate=0.0, refusal_error_rate=0.0)
    d = safety.demonstrations(heedless, 0, 60)["conversation"]
    assert {1 + 6 + 1, 1 + 6 + 3 + 1} == set(d["length"].tolist())


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"judge": "model"}, "args.judge"),
        ({"rounds": 0}, "args.rounds: expected 1 to"),
        ({"length": 2}, "args.length: expected 3 to"),
        ({"flag_error_rate": 1.5}, "args.flag_error_rate: expected a probability"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message):
        EnvConfig("safety", bad).check("config.env")
