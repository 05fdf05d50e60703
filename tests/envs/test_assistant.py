"""The assistant environment: a scripted perfect team, rewards by hand, and any text a model may write."""

import json
import math
import pickle

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.configs import joyagents_r1
from jaxmarl_llm.agents import memory
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs import bm25
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.assistant.reference_episodes import script
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message

CONFIG = assistant.Config()
SUM = assistant.Config(reward="sum")  # the paper's literal sum
ENV = assistant.make(CONFIG)
TASKS = assistant.tasks(CONFIG)
FIRST = {d: next(t for t in TASKS if t["domain"] == d) for d in assistant.DOMAINS}


def play(task, *texts, config=CONFIG, truncated=False):
    """The state and all rewards of the master after these messages, whoever has to say them."""
    env, rewards = assistant.make(config), []
    state, done = env.reset(0, task), False
    for text in texts:
        (role,) = env.observe(state)
        state, reward, done = env.step(0, state, {role: Action(text, (7,), truncated)})
        assert set(reward) == set(env.roles) and all(r == reward["master"] for r in reward.values())
        rewards.append(reward["master"])
    return state, rewards, done


def total(rewards, component):
    return sum(r.get(component, 0.0) for r in rewards)


def call(name, **arguments):
    return "Action: " + json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t["id"])
def test_a_perfect_team_scores_one(task):
    texts = [text for _, text in script(CONFIG, task)]
    state, rewards, done = play(task, *texts)
    assert done and state.final is not None and len(texts) == state.needed <= CONFIG.max_turns
    assert total(rewards, "accuracy") == 1.0
    assert total(rewards, "format") == pytest.approx(0.5) and total(rewards, "efficiency") == 0.0


def test_every_domain_and_split_has_tasks():
    for split in ("train", "test"):
        found = {t["domain"] for t in assistant.tasks(assistant.Config(split=split))}
        assert found == set(assistant.DOMAINS)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t["id"])
def test_doing_nothing_does_not_pay(task):
    assert total(play(task, "Final: done")[1], "accuracy") < 1.0


def test_tasks_that_pay_for_nothing_or_cannot_be_solved_are_left_out():
    shop = next(t for t in TASKS if t["domain"] == "shop" and not t["outputs"])
    assert assistant.solvable(CONFIG, shop)
    assert not assistant.solvable(CONFIG, shop | {"gold": []})  # an untouched database would score 1
    refused = {"name": "cancel_pending_order", "kwargs": {"order_id": "#W0", "reason": "no longer needed"}}
    assert not assistant.solvable(CONFIG, shop | {"gold": [*shop["gold"], refused]})
    assert not assistant.solvable(assistant.Config(observation_chars=1), shop | {"gold": _with_items()})
    assert not assistant.solvable(assistant.Config(max_turns=2), FIRST["math"])


def _with_items():
    """Gold calls of a task that needs an item id."""
    return next(t["gold"] for t in TASKS if t["domain"] == "shop" and "item_ids" in t["gold"][-1]["kwargs"])


def test_who_acts_and_what_they_read():
    task = FIRST["math"]
    state = ENV.reset(0, task)
    (prompt,) = ENV.observe(state).values()
    assert [m.speaker for m in prompt] == ["system", "user"] and prompt[1].text == f"Query: {task['query']}"
    said = Action("Delegate: math: {query}", (5, 6))
    state, _, _ = ENV.step(0, state, {"master": said})
    assert list(ENV.observe(state)) == ["math"] and ENV.observe(state)["math"][1].text == task["query"]
    state, _, _ = ENV.step(0, state, {"math": Action("so.\nAnswer: 3", (9,))})
    master = ENV.observe(state)["master"]
    assert master[2] == Message("assistant", said.text, (5, 6), "master")  # token in, token out
    assert master[3].text == "Report from math: 3"


def test_wrong_final_answers_score_less():
    for domain, wrong in {"qa": "nobody knows", "math": "-123456", "function": "done", "shop": "done"}.items():
        _, rewards, done = play(FIRST[domain], f"Final: {wrong}")
        assert done and total(rewards, "accuracy") == 0.0, domain
        assert total(rewards, "format") == total(rewards, "efficiency") == 0.0
        _, rewards, _ = play(FIRST[domain], f"Final: {wrong}", config=SUM)
        assert total(rewards, "accuracy") == 0.0 and total(rewards, "format") == pytest.approx(0.5)


def test_hedging_does_not_pay():
    gold = FIRST["math"]["gold"]
    assert total(play(FIRST["math"], f"Final: ${gold}.00")[1], "accuracy") == 1.0
    assert total(play(FIRST["math"], f"Final: 1000001 or {gold}")[1], "accuracy") == 0.0


def test_partial_credit():
    qa = FIRST["qa"] | {"gold": "New York City"}
    assert total(play(qa, "Final: York City")[1], "accuracy") == pytest.approx(0.8)
    function = FIRST["function"]
    texts = [text for _, text in script(CONFIG, function)]
    made = json.loads(texts[1].removeprefix("Action: "))
    key = next(iter(made["arguments"]))
    made["arguments"][key] = {"wrong": 1}
    _, rewards, _ = play(function, texts[0], "Action: " + json.dumps(made), *texts[2:])
    assert 0.0 <= total(rewards, "accuracy") < 1.0
    shop = next(t for t in TASKS if t["domain"] == "shop" and len(t["gold"]) >= 2)
    texts = [text for _, text in script(CONFIG, shop)]
    last = max(i for i, text in enumerate(texts) if text.startswith("Action:"))
    _, rewards, _ = play(shop, *texts[:last], *texts[last + 1 :])
    assert total(rewards, "accuracy") == pytest.approx(0.5 * (len(shop["gold"]) - 1) / len(shop["gold"]))


def test_a_write_too_many_costs_the_database():
    task = next(t for t in TASKS if t["domain"] == "shop" and len(script(CONFIG, t)) < CONFIG.max_turns)
    texts = [text for _, text in script(CONFIG, task)]
    place = dict.fromkeys(assistant.shop.ADDRESS, "x")
    extra = call("modify_user_address", user_id=task["user_id"], **place)
    _, rewards, _ = play(task, texts[0], extra, *texts[1:])
    assert total(rewards, "accuracy") == 0.5


def test_outputs_must_be_told():
    task = FIRST["shop"] | {"outputs": ["1,234"]}
    texts = [text for _, text in script(CONFIG, task)][:-1]
    assert total(play(task, *texts, "Final: it is $1234")[1], "accuracy") == 1.0
    assert total(play(task, *texts, "Final: done")[1], "accuracy") == 0.5


def test_format_and_efficiency_by_hand():
    task = FIRST["math"]
    good = [text for _, text in script(CONFIG, task)]
    for config in (CONFIG, SUM):  # the same where all is right
        _, rewards, _ = play(task, "hello", *good, config=config)  # 4 turns of 8, needed 3, one unreadable
        assert total(rewards, "format") == pytest.approx(0.5 * 7 / 8)
        assert total(rewards, "efficiency") == pytest.approx(0.3 * 1 / 5)
        _, rewards, _ = play(task, *good, truncated=True, config=config)
        assert total(rewards, "efficiency") == pytest.approx(0.3)
    _, rewards, done = play(task, *["hello"] * 8, config=SUM)
    assert done and total(rewards, "format") == 0.0 and total(rewards, "accuracy") == 0.0
    assert total(rewards, "efficiency") == pytest.approx(0.3)
    # an endless loop of delegations
    _, rewards, done = play(task, *["Delegate: math: x", "Answer: 1"] * 4, config=SUM)
    assert done and total(rewards, "format") == pytest.approx(0.5) and total(rewards, "accuracy") == 0.0


def test_format_and_efficiency_are_in_proportion_to_accuracy():
    qa = FIRST["qa"] | {"gold": "New York City"}
    more = ["hello"] * (CONFIG.max_turns - 3)  # as many turns as there are, more than the task needs
    texts = [*more, "Delegate: qa: x", "Answer: y", "Final: York City"]
    found = {c.reward: play(qa, *texts, config=c)[1] for c in (CONFIG, SUM)}
    for component in ("format", "efficiency"):
        assert total(found["sum"], component) > 0
        assert total(found["gated"], component) == pytest.approx(0.8 * total(found["sum"], component))
    assert total(found["gated"], "accuracy") == total(found["sum"], "accuracy") == pytest.approx(0.8)


def worth(task, *texts, config=CONFIG):
    """The return by the default weights."""
    rewards = play(task, *texts, config=config)[1]
    return sum(w * total(rewards, c) for c, w in {"accuracy": 1.0, "format": 1.0, "efficiency": -1.0}.items())


@pytest.mark.parametrize("domain", assistant.DOMAINS)
def test_an_answer_at_once_is_worth_no_more_than_a_delegation_that_fails(domain):
    """The paper's sum pays .50 for it, and less for a delegation: a team stops delegating."""
    failed = [f"Delegate: {domain}: {{query}}", "no idea", "Answer: nobody knows", "Final: nobody knows"]
    at_once = ["Final: nobody knows"]
    assert worth(FIRST[domain], *at_once) == worth(FIRST[domain], *failed) == 0.0
    assert worth(FIRST[domain], *at_once, config=SUM) > worth(FIRST[domain], *failed, config=SUM)


def test_memory_keeps_what_was_right():
    """Well-formed failures beside one success: only the success is stored, by the shipped weights of memories."""
    config = memory.MemoryConfig(capacity=8, retrieve=1, warmup=4)
    task = FIRST["math"]
    episodes = [["Final: -1"]] * 7 + [[text for _, text in script(CONFIG, task)]]
    for env, weights, kept in (
        (CONFIG, joyagents_r1.smollm2().memory_reward, {7}),
        (CONFIG, {"accuracy": 1.0, "format": 1.0}, {7}),
        (SUM, joyagents_r1.at_scale("path", joyagents_r1.MeshConfig()).memory_reward, {7}),
    ):
        paid = [play(task, *texts, config=env)[1] for texts in episodes]
        for rows, expected in ((paid, kept), (paid[:7], set())):
            reward = np.array([sum(w * total(r, c) for c, w in weights.items()) for r in rows], np.float32)
            n = len(rows)
            samples = memory.Samples(
                keys=np.eye(8, dtype=np.float32)[:n], ids=np.arange(n, dtype=np.int32)[:, None],
                length=np.ones(n, np.int32), text=np.zeros((n, 4), np.uint8), reward=reward,
                retrieved=np.full((n, 1), -1, np.int32), similarity=np.zeros((n, 1), np.float32),
                valid=np.ones(n, bool),
            )  # fmt: skip
            new, _ = memory.update(config, memory.init(config, dim=8, max_ids=1, max_bytes=4), samples, 0)
            assert {int(i) for i, used in zip(new.ids[:, 0], new.used) if used} == expected


def test_a_specialist_that_never_answers_is_sent_back():
    config = assistant.Config(max_specialist_turns=2)
    state, _, _ = play(FIRST["math"], "Delegate: math: x", "hm", "hm", config=config)
    assert state.role == "master" and state.master[-1].text == "Report from math: no answer"


@pytest.mark.parametrize("most", [1, 4, 9])
def test_delegation_without_end_ends_with_the_turns(most):
    """A master that always delegates, and specialists that never answer: a defined reward, and nothing for accuracy."""
    env = assistant.make(assistant.Config(max_turns=most, max_specialist_turns=2))
    state, done, paid = env.reset(0, FIRST["math"]), False, []
    while not done:
        (role,) = env.observe(state)
        text = "Delegate: math: again" if role == "master" else "hm"
        state, reward, done = env.step(0, state, {role: Action(text, (7,), False)})
        paid.append(reward["master"])
    assert len(paid) == most == env.max_turns
    assert all(math.isfinite(x) for r in paid for x in r.values()) and total(paid, "accuracy") == 0


BAD_CALLS = [
    "Action: {", "Action: []", "Action:", 'Action: {"name": "no_such_tool", "arguments": {}}',
    call("get_order_details"),
    call("get_order_details", order_id="#W1", extra=1), call("get_order_details", order_id=["#W1"]),
    call("get_order_details", order_id="x" * 10**7), "Action: " + "[" * 10**5,
    'Action: {"name":"\\ud800","arguments":{}}',
    'Action: {"name": "think", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001, "Answer:", "Search[x]",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_CALLS, ids=range(len(BAD_CALLS)))
@pytest.mark.parametrize("role", ["function", "shop", "qa", "math"])
def test_bad_calls_are_answered_and_the_episode_goes_on(role, text):
    state, _, done = play(FIRST[role], f"Delegate: {role}: do it", text)
    (prompt,) = ENV.observe(state).values()
    assert not done and state.role == role and state.calls == () and state.overlay == ()
    assert prompt[-1].text.startswith("Observation: Error:") and len(prompt[-1].text) < 300
    prompt[-1].text.encode("utf-8")


def test_observations_are_cut_with_a_marker():
    config = assistant.Config(observation_chars=50, domains=("shop",))
    order = FIRST["shop"]["gold"][0]["kwargs"]["order_id"]
    state, _, _ = play(FIRST["shop"], "Delegate: shop: x", call("get_order_details", order_id=order), config=config)
    (prompt,) = ENV.observe(state).values()
    assert prompt[-1].text.endswith(" [cut]") and len(prompt[-1].text) == len("Observation: ") + 50 + len(" [cut]")


def test_search_finds_the_supporting_passage():
    task = FIRST["qa"]
    for search in (f"Action: Search[{task['supporting'][0]}]", call("Search", query=task["supporting"][0])):
        state, _, _ = play(task, "Delegate: qa: {query}", search)
        assert state.thread[-1].text.startswith(f"Observation: {task['supporting'][0]}")


def test_the_wrong_specialist_sees_nothing_of_the_task():
    for role, empty in {"qa": "Passages:\nnone", "function": "Functions:\nnone", "shop": "Task: x\nTools:"}.items():
        state, _, _ = play(FIRST["math"], f"Delegate: {role}: x")
        assert empty in state.thread[0].text and FIRST["math"]["query"] not in state.thread[0].text


def test_local_verdicts():
    task = FIRST["math"]
    verdict = lambda *texts: ENV.verify(play(task, *texts)[0])["master"]
    assert verdict("Delegate: math: x") == {"accuracy": 1.0, "format": 0.5}
    assert verdict("Delegate: qa: x") == {"accuracy": 0.0, "format": 0.0}
    literal = assistant.make(SUM).verify(play(task, "Delegate: qa: x", config=SUM)[0])["master"]
    assert literal == {"accuracy": 0.0, "format": 0.5}
    assert verdict("nonsense") == {"accuracy": 0.0, "format": 0.0}
    assert verdict("Delegate: math: x", f"Answer: {task['gold']}")["accuracy"] == 1.0
    assert verdict("Delegate: math: x", "Answer: no")["accuracy"] == 0.0
    assert verdict("Delegate: qa: x", f"Answer: {task['gold']}")["accuracy"] == 0.0
    function = [text for _, text in script(CONFIG, FIRST["function"])]
    assert ENV.verify(play(FIRST["function"], *function[:2])[0])["qa"]["accuracy"] == 1.0
    qa = FIRST["qa"]
    search = f"Action: Search[{qa['supporting'][0]}]"
    assert ENV.verify(play(qa, "Delegate: qa: x", search)[0])["qa"]["accuracy"] == 1.0


@given(
    st.sampled_from(assistant.DOMAINS),
    st.sampled_from(["", "Delegate: ", "Action: ", "Answer: ", 'Action: {"name": "']),
    st.text(max_size=10_000),
    st.sampled_from(["master", *assistant.DOMAINS]),
)
@settings(max_examples=150, deadline=None)
def test_any_text_is_answered(domain, start, text, role):
    """Never raises; stepping twice from one state gives equal results and leaves it as it was; states pickle."""
    first = ENV.reset(0, FIRST[domain])
    if role != "master":
        first, _, _ = ENV.step(0, first, {"master": Action(f"Delegate: {role}: {{query}}", ())})
    frozen = pickle.dumps(first)
    action = {role: Action(start + text, (1,))}
    a, b = ENV.step(0, first, action), ENV.step(0, first, action)
    assert a == b and pickle.dumps(first) == frozen and pickle.loads(pickle.dumps(a[0])) == a[0]
    ENV.verify(a[0])
    if not a[2]:
        (prompt,) = ENV.observe(a[0]).values()
        assert all(isinstance(m, Message) for m in prompt)


@given(
    st.lists(
        st.sampled_from(["x", "Delegate: qa: y", "Delegate: shop: {query}", "Answer: 1", "Action: {}"]), max_size=8
    )
)
@settings(max_examples=60, deadline=None)
def test_reward_ranges(texts):
    texts = [*texts, *["x"] * (8 - len(texts))]
    _, rewards, done = play(FIRST["shop"], *texts)
    assert done
    assert 0.0 <= total(rewards, "format") <= 0.5 and 0.0 <= total(rewards, "efficiency") <= 0.3 + 1e-9
    assert 0.0 <= total(rewards, "accuracy") <= 1.0


def test_misuse_raises():
    state = ENV.reset(0, FIRST["math"])
    with pytest.raises(ValueError, match="expected one action"):
        ENV.step(0, state, {"qa": Action("x", ())})
    state, _, _ = ENV.step(0, state, {"master": Action("Final: 1", ())})
    with pytest.raises(ValueError, match="unfinished"):
        ENV.step(0, state, {"master": Action("Final: 1", ())})


def test_mixture_and_seed():
    config = assistant.Config(domains=("math", "qa"), mixture=(3.0, 1.0), count=10)
    tasks = assistant.tasks(config)
    assert [t["domain"] for t in tasks].count("math") in (7, 8) and len(tasks) == 10
    assert tasks == assistant.tasks(config) != assistant.tasks(assistant.Config(**vars(config) | {"seed": 1}))
    with pytest.raises(ConfigError, match=r"count: expected at most \d+ of domain qa"):
        assistant.tasks(assistant.Config(domains=("qa",), count=10**6))


@pytest.mark.parametrize(
    "wrong", [{"domains": ("chess",)}, {"domains": ()}, {"mixture": (1.0,)}, {"max_turns": 0}, {"count": -1}]
)
def test_bad_settings(wrong):
    with pytest.raises(ConfigError):
        from_dict(assistant.Config, wrong)


def test_demonstrations_teach_every_role():
    samples = assistant.demonstrations(CONFIG, TASKS)
    assert {role for role, _, _ in samples} == set(assistant.ROLES)
    for role, prompt, completion in samples:
        assert prompt[0].text == assistant.SYSTEM[role] and prompt[-1].speaker == "user" and completion.strip()
        assert all(m.ids is None for m in prompt)
        assert "<<" not in completion
    short = sorted(sum(len(m.text) for m in prompt) for role, prompt, _ in samples if role != "shop")
    assert short[len(short) // 2] < 1000  # characters: about 250 tokens


def test_memory_goes_into_the_system_message():
    (_, plain, _), *_ = assistant.demonstrations(CONFIG, [FIRST["qa"]])
    prompt = assistant.with_memory(plain, ["look\ntwice", "be brief"])
    assert prompt[0].text == plain[0].text + "\nStrategies that worked before:\n- look twice\n- be brief"
    assert prompt[1:] == plain[1:] and assistant.with_memory(plain, []) == plain
    with pytest.raises(ValueError, match="system"):
        assistant.with_memory(plain[1:], ["x"])


def test_strategies_are_short():
    prompt = ENV.observe(ENV.reset(0, FIRST["shop"]))["master"]
    text = assistant.strategy("master", prompt, Action("Delegate: shop:\n" + "x" * 500, ()), {"accuracy": 1.0})
    assert len(text) <= 200 and "\n" not in text and "Delegate: shop" in text and FIRST["shop"]["query"][:20] in text


def test_the_whole_environment_pickles():
    env = pickle.loads(pickle.dumps(ENV))
    assert env.reset(0, FIRST["qa"]) == ENV.reset(0, FIRST["qa"])


def test_bm25_agrees_with_bm25s():
    for task in [t for t in TASKS if t["domain"] == "qa"][:10]:
        passages = [f"{title}: {text}" for title, text in task["passages"]]
        other = bm25s.BM25(method="lucene", k1=bm25.K1, b=bm25.B)
        other.index([bm25.words(p) for p in passages], show_progress=False)
        theirs = other.get_scores(bm25.words(task["query"]))
        assert bm25.bm25(task["query"], passages) == pytest.approx(theirs.tolist(), rel=1e-4)
