"""`jaxmarl-llm chat`: who is said to read whom, beside prompts that are written down; a team beside its rollout."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxmarl_llm.cli import chat, trained_run
from jaxmarl_llm.cli.episodes import Player, play
from jaxmarl_llm.envs import TextTask
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.contract import HostTask, check
from jaxmarl_llm.envs.protocols import wrap
from jaxmarl_llm.envs.writing import env as writing
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message
from tests.cli.tiny_runs import tiny_run

ROWS = {"train": [{"subject": "sea"}], "test": [{"subject": "sun"}]}
PROMPTS = {"master": "Plan: {subject}", "poet": "Write. Plan: {master}", "critic": "Judge. Plan: {master}"}


def given(run="run", **changes):
    defaults = {"step": None, "best": False, "greedy": True, "temperature": None, "say": None, "prompts": False}
    return argparse.Namespace(run=run, seed=0, **{**defaults, **changes})


def unpaid(task, texts):
    assert task["subject"] in ("sea", "sun"), "the reward of a task without an answer"
    return 0.0


def shown(task, asked, said, env=None, entries=(), prompts=False):
    """What the command prints of an episode in which each role says ``said[role]``, one after the other."""
    out, rest = io.StringIO(), {role: iter(texts) for role, texts in said.items()}
    complete = lambda role, prompt, turn: Action(text := next(rest[role]), tuple(text.encode()))
    recall = lambda role, prompt: (task.with_memory(prompt, list(entries)), list(entries))
    env = env or task.make()
    transcript = chat.Transcript(task, Console(file=out, soft_wrap=True), prompts)
    play(env, task.ask(asked), dict.fromkeys(env.roles, Player(complete, recall)), 0, transcript)
    return out.getvalue()


def test_receivers_are_the_roles_that_read_a_message():
    task = TextTask(ROWS, PROMPTS, unpaid, turns=list(PROMPTS))
    assert shown(task, "rain", {"master": ["two lines"], "poet": ["drip\ndrop"], "critic": ["fine"]}) == (
        "turn 1  master -> poet: two lines\n"
        "turn 2  poet -> environment: drip\ndrop\n"
        "        critic reads what master said on turn 1\n"
        "turn 3  critic -> you: fine\n"
        "answer: fine\n"
    )


def test_roles_that_write_at_once_and_then_read_each_other():
    two = {"left": "About {subject}.", "right": "On {subject}."}
    task = TextTask(ROWS, two, unpaid)
    said = {"left": ["a draft", "a text"], "right": ["a sketch", "another text"]}
    assert shown(task, "rain", said, wrap(task.make(), "discussion")) == (
        "turn 1  left -> right: a draft\n"
        "turn 1  right -> left: a sketch\n"
        "turn 2  left -> you: a text\n"
        "turn 2  right -> you: another text\n"
        "answer of left: a text\n"
        "answer of right: another text\n"
    )


def test_a_word_inside_another_word_is_no_quotation():
    task = TextTask(ROWS, {"master": "{subject}", "poet": "Plan for {subject}"}, unpaid, turns=["master", "poet"])
    for text, reader in (("la", "environment"), ("Plan", "poet"), ("", "environment"), (" \n", "environment")):
        assert f"turn 1  master -> {reader}: {text}\n" in shown(task, "rain", {"master": [text], "poet": ["x"]})


def test_prompts_and_memory_entries_are_shown():
    task = TextTask(ROWS, {"master": "Plan: {subject}"}, unpaid)
    assert shown(task, "rain", {"master": ["yes"]}, entries=["be\nbrief"], prompts=True) == (
        "        master remembers: be brief\n"
        "        master reads:\n"
        "        [system] \n"
        "        Strategies that worked before:\n"
        "        - be brief\n"
        "        [user] Plan: rain\n"
        "turn 1  master -> you: yes\n"
        "answer: yes\n"
    )


def test_what_controls_a_terminal_is_not_printed():
    task = TextTask(ROWS, {"master": "Plan: {subject}"}, unpaid)
    printed = shown(task, "rain", {"master": ["a\x1b[2Jb\rc[bold]"]})
    assert "answer: a\ufffd[2Jb\ufffdc[bold]\n" in printed and "\x1b" not in printed


# ---------------------------------------------------------------------------------------- tasks of a person's text


def test_the_field_of_a_text_task():
    rows = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
    data = {"train": rows[:1], "test": rows[1:]}
    graded = lambda task, texts: float(task["answer"] in "24")
    of = lambda prompts, **more: TextTask(data, prompts, graded, same_tasks=True, **more).ask
    assert of({"solver": "{question}?", "judge": "{question[0]} {solver}"}, turns=["solver", "judge"])("x") == {
        "question": "x"
    }
    assert of({"solver": "{question} {answer}"}) is None and of({"solver": "Say 2."}) is None
    assert of({"solver": lambda task: task["question"]}) is None
    assert of({"solver": lambda task: task["question"]}, ask="question")("x") == {"question": "x"}
    assert of({"solver": "{question}"}, ask=lambda text: {"question": text.upper()})("x") == {"question": "X"}
    for wrong, says in (
        ("qestion", "row 0: ask: no field 'qestion'; did you mean 'question'"),
        (3, "ask: expected the name of a field or a function, got int"),
        (lambda: {}, r"ask: takes \(\), expected \(text\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            of({"solver": "{question}"}, ask=wrong)
    with pytest.raises(ConfigError, match="ask: returned 'x', expected a mapping with names as keys"):
        of({"solver": "{question}"}, ask=lambda text: text)("x")


def test_a_task_with_an_answer_is_still_paid():
    task = TextTask(ROWS, {"master": "{subject}"}, lambda task, texts: 1.0)
    env = task.make()
    for asked, paid in ((task.tasks[0], {"master": {"reward": 1.0}}), (task.ask("sea"), {})):
        assert env.step(0, env.reset(0, asked), {"master": Action("x", (120,))})[1:] == (paid, True)


@pytest.mark.parametrize("member", ["ask", "hears"])
def test_a_member_that_is_no_function_is_refused(member):
    task = TextTask(ROWS, {"master": "{subject}"}, lambda task, texts: 1.0)
    wrong = HostTask(task.make, task.tasks, task.held_out, **{member: 3})
    with pytest.raises(ConfigError, match=f"environment 'mine': {member}: expected a function, got int"):
        check(wrong, "mine")


def test_the_assistant_answers_any_query():
    config = assistant.Config(max_turns=6)
    task = HostTask(
        lambda: assistant.make(config), [0], [1], ask=lambda t: assistant.ask(config, t), hears=assistant.hears
    )
    said = {
        "master": ["hm", "Delegate: qa: {query}", "Delegate: math: 1+1", "Final: two"],
        "qa": ["Action: Search[sum]", "Answer: ask math"],
        "math": ["Answer: 2"],
    }
    task_6, task_7 = (
        task,
        HostTask(lambda: assistant.make(assistant.Config(max_turns=7)), [0], [1], ask=task.ask, hears=task.hears),
    )
    assert "answer: Answer: 2\n" in shown(task_6, "How many?", said)
    assert shown(task_7, "How many?", said, prompts=False) == (
        "turn 1  master -> environment: hm\n"
        "turn 2  master -> qa: Delegate: qa: {query}\n"
        "turn 3  qa -> environment: Action: Search[sum]\n"
        "turn 4  qa -> master: Answer: ask math\n"
        "turn 5  master -> math: Delegate: math: 1+1\n"
        "turn 6  math -> master: Answer: 2\n"
        "turn 7  master -> you: Final: two\n"
        "answer: Final: two\n"
    )


def test_a_query_is_what_the_assistants_roles_read_and_is_not_paid():
    config = assistant.Config()
    env = assistant.make(config)
    state = env.reset(0, assistant.ask(config, "Why?"))
    assert env.observe(state)["master"][1] == Message("user", "Query: Why?")
    after, rewards, done = env.step(0, state, {"master": Action("Final: so", ())})
    assert done and after.final == "so" and not any(rewards.values())


def test_a_text_is_what_the_writers_read():
    config = writing.Config(max_turns=2, feedback="level")
    env = writing.make(config)
    state = env.reset(0, writing.ask(config, "A short text."))
    assert {prompt[1].text for prompt in env.observe(state).values()} == {"A short text."}
    state, _, done = env.step(0, state, {role: Action("Short.", ()) for role in env.roles})
    assert not done and env.observe(state)["concise"][-1].text.endswith("Revise your text.")


@pytest.mark.parametrize("text, name", [("Add numbers.", "solution"), ("Write\n  def  add(a, b):", "add")])
def test_a_problem_is_what_the_programmers_read_and_nothing_is_run(text, name, monkeypatch):
    monkeypatch.setattr(coding, "grade", lambda *_: pytest.fail("a program without tests was judged"))
    config = coding.Config(max_turns=2, feedback="level", unsafe_exec=True)
    state = coding.reset(0, coding.ask(config, text))
    read = coding.observe(state)["main"][1].text
    assert f"Solve this:\n\n{text}\n" in read and f"Write only {name}. " in read
    said = {"helper": Action("def aux(): return 1", ()), "main": Action("no code", ())}
    state, rewards, done = coding.step(config, 0, state, said)
    assert "- tests: not run" in coding.observe(state)["main"][-1].text and not done
    assert not any(rewards.values()) and not any(coding.step(config, 0, state, said)[1].values())


# --------------------------------------------------------------------------------------------------- the command


def opened(monkeypatch, run):
    monkeypatch.setattr(trained_run, "open_run", lambda *_, **__: run)


def test_the_team_says_what_its_rollout_says(capitals, monkeypatch, capsys, tmp_path):
    """At temperature 0: the texts of `EnvRunner.play` on the held-out task with the same prompt, which is Peru."""
    import jax

    from jaxmarl_llm.generation.sampling import Sampling
    from jaxmarl_llm.rollout.plans import single

    cfg, recipe, state = tiny_run(capitals)
    opened(monkeypatch, (cfg, recipe, state))
    key, greedy = jax.random.key(9), Sampling(temperature=0.0)
    rollout = recipe.env_runner.play(recipe.team, state.params, {}, [0], single(), key, greedy, None, held_out=True)
    (tmp_path / "lines.txt").write_text("Peru\n\n/quit\nJapan\n")
    assert chat.main(given(say=str(tmp_path / "lines.txt"), prompts=True)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("you: Peru\n        solver reads:\n        [user] Capital of Peru?\n")
    for place, role in enumerate(("solver", "judge")):
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in rollout.completion_text(place))
        assert f"turn 1  {role} -> you: {text}\n" in printed and f"answer of {role}: {text}\n" in printed
    assert "Japan" not in printed and "accuracy" not in printed


def test_the_end_of_the_input_and_quit_end_with_0(capitals, monkeypatch, capsys):
    opened(monkeypatch, tiny_run(capitals))
    for typed, lines in (("", 0), ("  \n/quit\nPeru\n", 0), ("Peru\nPe\\nru", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert chat.main(given(prompts=True)) == 0
        printed = capsys.readouterr().out
        assert printed.count("Capital of Pe") == lines and ("Pe\n        ru?" in printed) == (lines == 2)


def test_samples_differ_between_lines_and_follow_the_seed(capitals, monkeypatch, capsys, tmp_path):
    opened(monkeypatch, tiny_run(capitals))
    (tmp_path / "lines.txt").write_text("Peru\nPeru\n")
    told = []
    for seed in (0, 0, 1):
        arguments = given(say=str(tmp_path / "lines.txt"), greedy=False, temperature=1.5)
        arguments.seed = seed
        assert chat.main(arguments) == 0
        told.append(capsys.readouterr().out.split("you: Peru\n")[1:])
    assert told[0] == told[1] and told[0][0] != told[0][1] == told[2][0]


def test_memory_of_the_run_is_read(capitals, monkeypatch, capsys, tmp_path):
    import jax.numpy as jnp

    from jaxmarl_llm.agents.memory import encode_text

    memory = {"capacity": 4, "retrieve": 1, "min_similarity": -1.0}
    cfg, recipe, state = tiny_run(capitals, "joyagents_r1", group=2, memory=memory, memory_reward={"accuracy": 1.0})
    store = state.memory["solver"]
    text = jnp.array(encode_text("name a city", store.text.shape[1]))
    store = store.replace(
        key=store.key.at[2, 0].set(1.0), text=store.text.at[2].set(text), used=store.used.at[2].set(True)
    )
    opened(monkeypatch, (cfg, recipe, state.replace(memory={**state.memory, "solver": store})))
    (tmp_path / "lines.txt").write_text("Peru\n")
    assert chat.main(given(say=str(tmp_path / "lines.txt"), prompts=True)) == 0
    printed = capsys.readouterr().out
    assert "solver remembers: name a city" in printed and "- name a city\n        [user] Capital of Peru?" in printed
    assert "judge remembers" not in printed


OWN = """
from jaxmarl_llm import TextTask
from jaxmarl_llm.errors import ConfigError

def refuse(text):
    if text == "wrong":
        raise ConfigError("ask: expected a country")
    return {"country": text}

def prompt(task):
    return f"{task['country']} {len(task['capital'])}"

def make():
    rows = {"train": [{"country": "Peru", "capital": "Lima"}], "test": [{"country": "Cuba", "capital": "Havana"}]}
    return TextTask(rows, {"solver": prompt}, lambda task, texts: {"accuracy": 1.0}, ask=refuse)
"""


def test_bad_lines(monkeypatch, capsys, tmp_path):
    (tmp_path / "own_asked.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    opened(monkeypatch, tiny_run("own_asked:make"))
    monkeypatch.setattr("sys.stdin", io.StringIO("wrong\n/quit\n"))
    assert chat.main(given()) == 0
    assert "error: ask: expected a country\n" in capsys.readouterr().out
    for line, says in (("wrong", "ask: expected a country"), ("Peru", r"prompts\['solver'\]: .*'capital'")):
        (tmp_path / "lines.txt").write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=says):
            chat.main(given(say=str(tmp_path / "lines.txt")))


def test_an_environment_that_raises_is_one_line(capitals, monkeypatch, tmp_path):
    cfg, recipe, state = tiny_run(capitals)

    def broken(seed, state, actions):
        raise KeyError("answer")

    recipe.env_runner.env = recipe.env_runner.env._replace(step=broken)
    opened(monkeypatch, (cfg, recipe, state))
    (tmp_path / "lines.txt").write_text("Peru\n")
    with pytest.raises(ConfigError, match="a task that its `ask` made cannot be played: KeyError: 'answer'"):
        chat.main(given(say=str(tmp_path / "lines.txt")))


def test_environments_without_free_text(monkeypatch):
    opened(monkeypatch, tiny_run("matrix", reward={"payoff": 1.0}))
    with pytest.raises(ConfigError, match=r"'matrix' is an array environment, without text; .*: jaxmarl-llm view run"):
        chat.main(given())
    opened(monkeypatch, tiny_run("dilemma_text", reward={"payoff": 1.0}))
    with pytest.raises(ConfigError, match=r"'dilemma_text' takes no free text.*jaxmarl-llm play --workdir=run --watch"):
        chat.main(given())


def test_folders_files_and_flags_that_are_wrong(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export/team.json").write_text("{}")
    (tmp_path / "latin.txt").write_bytes(b"\xff\n")
    for arguments, says in (
        (given(str(tmp_path / "export")), "RUN: .*export is an export, which has no environment"),
        (given(str(tmp_path)), "RUN: .* holds no checkpoints; train first"),
        (given(say=str(tmp_path / "no.txt")), "--say=.*no.txt: No such file or directory; expected a text file"),
        (given(say=str(tmp_path / "latin.txt")), "--say=.*latin.txt: not UTF-8; expected a text file"),
        (given(greedy=False, temperature=-1.0), "--temperature: expected >= 0, got -1.0"),
        (given(greedy=False, temperature=float("nan")), "--temperature: "),
    ):
        with pytest.raises(ConfigError, match=says):
            chat.main(arguments)


def test_a_checkpoint_of_a_folder_is_chosen(capitals, tmp_path, capsys):
    """Steps 1 and 2 on disk, with other parameters; the newest is 2."""
    import jax

    from jaxmarl_llm.config import to_dict
    from jaxmarl_llm.runs.loop import fingerprint_of, without_shared
    from jaxmarl_llm.storage.checkpoint import Checkpointer

    cfg, _, state = tiny_run(capitals)
    meta = {"config": to_dict(cfg), "backbone": fingerprint_of(state.params["shared"])}
    saver = Checkpointer(tmp_path / "run")
    for step in (1, 2):
        moved = jax.tree.map(lambda x, step=step: x[::-1] * step, state.params["agents"])
        saver.save(step, without_shared(state.replace(params={**state.params, "agents": moved})), meta)
    saver.close()
    (tmp_path / "lines.txt").write_text("Peru\n")

    def printed(**changes):
        assert chat.main(given(str(tmp_path / "run"), say=str(tmp_path / "lines.txt"), **changes)) == 0
        return capsys.readouterr().out

    assert printed() == printed(step=2) != printed(step=1)
    with pytest.raises(ConfigError, match=r"--step=7: .*run/checkpoints holds no such step; it holds 1, 2$"):
        chat.main(given(str(tmp_path / "run"), step=7))
    with pytest.raises(ConfigError, match=r"RUN: .*run holds no best step; train with --config.run.best"):
        chat.main(given(str(tmp_path / "run"), best=True))


def test_the_command_ends_wrong_input_with_one_line(tmp_path):
    command = [sys.executable, "-m", "jaxmarl_llm", "chat", "nowhere"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.returncode == 2 and done.stderr == "error: RUN: nowhere holds no checkpoints; train first\n"
