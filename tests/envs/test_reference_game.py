"""The reference game: who reads what, how a choice is read, groups that make a hint necessary, bad data, a tiny run."""

import dataclasses
import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import red_team_reference as red
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import bm25, scitldr
from jaxmarl_llm.envs.reference_game import env as game
from jaxmarl_llm.envs.reference_game import groups, solo
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.runs import loop

TRAIN, TEST = (game.tasks(game.Config(split=split)) for split in ("train", "test"))
TASK = TRAIN[0]
TITLES = ["Deep Nets: A Study", "Deep Trees", "On Trees and Nets", "A Study of Sums"]


def played(task, hint, answer, *, config=game.Config(), **flags):
    """The rewards of an episode."""
    env = game.make(config)
    state, paid, done = env.step(0, env.reset(0, task), {"speaker": Action(hint, (), flags.get("hint_cut", False))})
    assert not paid and not done
    _, paid, done = env.step(0, state, {"listener": Action(answer, (), flags.get("cut", False))})
    assert done and paid["speaker"] == paid["listener"]
    return paid["listener"]


@pytest.mark.parametrize(
    ("answer", "cut", "place"),
    [
        ("Deep Nets", False, 0),
        ("deep nets a study", False, 0),  # case and punctuation do not count
        ("  A\nSTUDY, of ", False, 3),
        ("On", False, 2),  # one word may be enough
        ("Deep", False, None),  # two titles begin so
        ("Deep Nets: A Study of", False, None),  # longer than the title
        ("Deep Trees. On Trees", False, None),
        ("Deep Trees Trees", False, None),
        ("The title is Deep Trees", False, None),
        ("Trees and", False, None),
        ("Deep Tre", False, None),
        ("Deep Tre", True, 1),  # the limit ended the last word
        ("Dee", True, None),
        ("Da Trees", True, None),
        ("", True, None),
        ("?!", False, None),
    ],
)
def test_an_answer_names_the_title_whose_first_words_it_has(answer, cut, place):
    assert groups.named(answer, TITLES, cut) == place


def test_rewards_by_hand():
    task = {**TASK, "titles": TITLES, "answer": 1}
    assert played(task, "about trees", "Deep Trees") == {"chosen": 1, "named": 1, "hint_words": 2, "hint_ended": 1}
    wrong = played(task, "one two three", "On trees", hint_cut=True)
    assert wrong == {"chosen": 0, "named": 1, "hint_words": 3, "hint_ended": 0}
    assert played(task, "", "no title")["named"] == 0 == played(task, "", "")["chosen"]
    assert played(task, "word " * 40, "Deep", config=game.Config(hint_words=5))["hint_words"] == 5


@given(st.text(max_size=80), st.text(max_size=80), st.booleans())
def test_any_text_has_a_reward(hint, answer, cut):
    paid = played(TASK, hint, answer, cut=cut)
    assert set(paid) == set(game.COMPONENTS) and paid["chosen"] <= paid["named"] <= 1


def test_the_speaker_reads_no_title_and_the_listener_no_abstract():
    env = game.make(game.Config())
    hints = {}
    for task in (*TRAIN, *TEST):
        start = env.reset(0, task)
        (asked,) = env.observe(start).values()
        other = {
            **task,
            "title": "another",
            "titles": ["one", "two", "three", "four"],
            "answer": 3,
            "targets": ["none"],
        }
        assert env.observe(env.reset(0, other)) == {"speaker": asked}  # nothing but the abstract is shown
        state, _, _ = env.step(0, start, {"speaker": Action("a hint", ())})
        (read,) = env.observe(state).values()
        moved, _, _ = env.step(
            0, env.reset(0, {**task, "text": "x", "targets": ["x"]}), {"speaker": Action("a hint", ())}
        )
        assert env.observe(moved) == {"listener": read}  # nothing but titles and hint is shown
        assert [title in read[1].text for title in task["titles"]] == [True] * 4
        hints.setdefault(tuple(task["titles"]), set()).add(read)
    assert {len(prompts) for prompts in hints.values()} == {1}  # no prompt says which of the four is wanted


def test_the_hint_is_one_line_of_at_most_so_many_words():
    env = game.make(game.Config(hint_words=4))
    state, _, _ = env.step(0, env.reset(0, TASK), {"speaker": Action("a\nTitles:\n- fake title and more", ())})
    shown = env.observe(state)["listener"][1].text
    assert shown.endswith("\nHint: a Titles: - fake") and shown.count("\n- ") == 4
    empty, _, _ = env.step(0, env.reset(0, TASK), {"speaker": Action(" ", ())})
    assert env.observe(empty)["listener"][1].text.endswith("\nHint: (none)")
    assert game.hears("listener", (), "speaker", "a") and not game.hears("speaker", (), "listener", "a")


def test_an_episode_is_pure():
    env = game.make(game.Config())
    start = env.reset(0, TASK)
    before = pickle.dumps(start)
    said = {"speaker": Action("a hint", (1,))}
    assert env.step(0, start, said) == env.step(1, start, said) and pickle.dumps(start) == before
    state, _, _ = env.step(0, start, said)
    assert pickle.loads(pickle.dumps(state)) == state
    done, _, _ = env.step(0, state, {"listener": Action("x", ())})
    for bad, actions in ((start, {"listener": Action("x", ())}), (state, said), (done, {"listener": Action("x", ())})):
        with pytest.raises(ValueError, match="expected one action of"):
            env.step(0, bad, actions)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [TRAIN, TEST], ids=["train", "test"])
def test_every_title_of_a_group_is_wanted_once(tasks):
    """So a rule that ignores the hint is right once in each group, or less often."""
    assert len({task["id"] for task in tasks}) == len(tasks)
    assert len({tuple(task["titles"]) for task in tasks}) == len(tasks) / 4
    for i in range(0, len(tasks), 4):
        group = tasks[i : i + 4]
        assert [task["answer"] for task in group] == [0, 1, 2, 3] and len({tuple(t["titles"]) for t in group}) == 1
        assert [task["titles"][task["answer"]] for task in group] == [scitldr.opening(t["title"], 12) for t in group]
    table = red.game_table(game.Config(split="train" if tasks is TRAIN else "test"))
    blind = [name for name, team in red.GAME.items() if name.startswith("human") or team.speaker(TASK) == ""]
    assert len(blind) > 15 and max(sum(table.rewards[name]) for name in blind) == len(tasks) / 4


def test_groups_are_of_one_field():
    """Words are shared more often within a group than between groups."""
    found = [groups._rare([bm25.words(t["text"]) for t in TRAIN])][0]
    shared = lambda i, j: len({*found[i].split()} & {*found[j].split()})
    within = sum(shared(i, j) for k in range(0, 64, 4) for i in range(k, k + 4) for j in range(k, i))
    across = sum(shared(i, (i + 4 * step) % 64) for i in range(64) for step in (1, 2, 3)) / 2
    assert within > 1.5 * across


def test_groups_depend_on_content_alone():
    rows, _ = scitldr.articles(None, "train", 0)
    names = lambda made: [[article["id"] for article in group] for group in made]
    assert names(groups.parted(rows, 4, 12)) == names(groups.parted(rows[::-1], 4, 12))
    assert {t["id"]: t["titles"] for t in TRAIN} == {t["id"]: t["titles"] for t in game.tasks(game.Config(seed=1))}
    assert game.tasks(game.Config(seed=1)) != TRAIN and game.tasks(game.Config(count=6)) == TRAIN[:6]


def article(number, title):
    return {"id": str(number), "title": title, "text": f"words {number}", "targets": ["a"]}


def test_titles_that_begin_alike_are_not_in_one_group():
    same = [article(i, "The Same Title") for i in range(4)]
    assert groups.parted(same, 2, 12) == []
    made = groups.parted([*same, *(article(9 + i, f"Title {i}") for i in range(4))], 2, 12)
    assert len(made) == 4
    assert all(len({a["title"] for a in group}) == 2 for group in made)
    assert groups.parted([article(0, "A B C"), article(1, "A B D")], 2, 2) == []  # what is shown of them is the same
    assert groups.parted([article(0, "???"), article(1, "A B D")], 2, 12) == []


def test_first_words_tell_a_title_apart():
    assert groups.first_words(TITLES, 0, 1) == "Deep Nets:" and groups.first_words(TITLES, 2, 3) == "On Trees and"
    assert groups.first_words(TITLES, 1, 3) == "Deep Trees"


def test_no_article_is_on_both_sides():
    words = [{loaders.content(task["text"]) for task in tasks} for tasks in (TRAIN, TEST)]
    titles = [{title for task in tasks for title in task["titles"]} for tasks in (TRAIN, TEST)]
    assert words[0] and words[1] and not words[0] & words[1] and not titles[0] & titles[1]


# -- hints by a rule, demonstrations, one agent alone ------------------------------------------------------------------


@pytest.mark.parametrize("hint", ["human", "keywords", "lead", "none"])
def test_a_hint_by_a_rule(hint):
    config = game.Config(hint=hint, hint_words=5)
    env = game.make(config)
    assert env.max_turns == 1 and env.roles == game.ROLES
    source = {"human": TASK["targets"][0], "lead": TASK["text"], "none": "", "keywords": game.keywords(config, TASK)}
    state = env.reset(0, TASK)
    assert env.observe(state)["listener"][1].text.endswith("Hint: " + (" ".join(source[hint].split()[:5]) or "(none)"))
    _, paid, done = env.step(0, state, {"listener": Action(TASK["titles"][TASK["answer"]], ())})
    assert done and paid["speaker"]["chosen"] == 1
    samples = game.demonstrations(config, TRAIN)
    assert len(samples) == len(TRAIN) and {role for role, _, _ in samples} == {"listener"}


def test_demonstrations_are_what_the_roles_read_and_are_right():
    config = game.Config()
    samples = game.demonstrations(config, TRAIN)
    assert [role for role, _, _ in samples].count("speaker") > 60
    for role, prompt, text in samples:
        task = next(
            t
            for t in TRAIN
            if role == "speaker"
            or set(t["titles"])
            <= {*prompt[1].text.split("\n- ")} | {line.partition("\nHint")[0] for line in prompt[1].text.split("\n- ")}
        )
        if role == "listener":
            assert groups.named(text, task["titles"]) is not None and 2 <= len(text.split()) <= 12
        else:
            assert 1 <= len(text.split()) <= game.KEYWORDS and "\n" not in prompt[1].text
    own = [(p, text) for role, p, text in game.demonstrations(config, [TASK]) if role == "listener"]
    assert len(own) == 2 and {groups.named(text, TASK["titles"]) for _, text in own} == {TASK["answer"]}


def test_keywords_are_words_of_the_title_that_the_speaker_can_know():
    task = {
        "title": "The Learning of Zebra Nets",
        "text": "We learn zebras. " + "x " * 90 + "nets",
        "targets": ["Zebras in x."],
    }
    assert game.keywords(game.Config(abstract_words=20), task) == "learning zebra"
    assert game.keywords(game.Config(), task) == "learning zebra nets"
    assert (
        game.keywords(game.Config(), {**task, "title": "Zebra", "text": "zebra herds", "targets": ["Herds."]})
        == "zebra herds"
    )


def test_one_agent_alone_reads_both():
    env = solo.make(game.Config(abstract_words=9))
    state = env.reset(0, TASK)
    shown = env.observe(state)["solo"][1].text
    assert " ".join(TASK["text"].split()[:9]) in shown and all(title in shown for title in TASK["titles"])
    _, paid, done = env.step(0, state, {"solo": Action(TASK["titles"][TASK["answer"]], ())})
    assert done and paid == {"solo": {"chosen": 1.0, "named": 1.0}}
    assert len(solo.demonstrations(game.Config(), TRAIN)) == len(TRAIN)


def test_places_of_answers_are_logged():
    said = [(TASK, {"listener": TASK["titles"][i]}) for i in (0, 0, 2)] + [
        (TASK, {"speaker": "a"}),
        (TASK, {"listener": ""}),
    ]
    assert game.episode_metrics(said) == {
        "place/1": 0.5,
        "place/2": 0,
        "place/3": 0.25,
        "place/4": 0,
        "place/none": 0.25,
    }
    assert game.episode_metrics([])["place/none"] == 0


# -- bad input ---------------------------------------------------------------------------------------------------------


def data(tmp_path, **changed):
    """A folder with the package's test split and one damaged training article among nine."""
    folder = tmp_path / "SciTLDR-A"
    folder.mkdir()
    source = loaders.FIXTURES / "scitldr" / "SciTLDR-A"
    (folder / "test.jsonl").write_text((source / "test.jsonl").read_text())
    rows = (source / "train.jsonl").read_text().splitlines()[:9]
    rows[4] = json.dumps({**json.loads(rows[4]), **changed})
    (folder / "train.jsonl").write_text("\n".join(rows))
    return str(tmp_path)


@pytest.mark.parametrize("name", ["reference_game", "reference_game_solo", "two_writers", "two_writers_solo"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source": []}, "train.jsonl, line 5: field 'source' must be a filled list"),
        ({"source": [" "]}, "train.jsonl, line 5: the text and its summaries must not be blank"),
        ({"target": []}, "train.jsonl, line 5: field 'target' must be a filled list"),
        ({"target": ["  "]}, "train.jsonl, line 5: the text and its summaries must not be blank"),
        ({"title": ""}, "train.jsonl, line 5: field 'title' must be a filled str"),
    ],
)
def test_a_damaged_article_is_named(name, changed, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        EnvConfig(name, {"data": data(tmp_path, **changed)}).environment(0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["reference_game", "two_writers"])
def test_a_folder_without_the_data_is_named_with_the_command(name, tmp_path):
    for folder in ("/nowhere", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"args\.data: expected a folder with SciTLDR-A .*git clone") as error:
            EnvConfig(name, {"data": folder}).environment(0)
        assert repr(folder) in str(error.value) and "\n" not in str(error.value)


def test_articles_that_fit_no_group_are_left_out_and_counted(tmp_path, caplog):
    config = game.Config(data=data(tmp_path))
    with caplog.at_level("INFO"):
        assert len(game.tasks(config)) == 8
    assert "9 of 9; 8 of them are in groups of 4" in caplog.text
    with pytest.raises(ConfigError, match=r"args\.count: expected at most 8, the usable articles in .*, got 9"):
        game.tasks(dataclasses.replace(config, count=9))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hint": "title"}, "hint: unknown value 'title'"),
        ({"titles": 1}, "titles: expected 2 to 16, got 1"),
        ({"abstract_words": 0}, "abstract_words: expected 1 to"),
        ({"split": "dev"}, "split: unknown value 'dev'"),
    ],
)
def test_bad_settings_are_refused(args, message):
    with pytest.raises(ConfigError, match=re.escape(f"config.env.args.{message}")):
        from_dict(game.Config, args, "config.env.args")


def test_demonstrations_that_do_not_fit_are_an_error():
    cfg = config_flags.load("magrpo:reference_game_tiny", [("team.max_new_tokens", "20"), ("sft.min_fitting", "0.9")])
    expected = r"config\.team\.max_new_tokens: \d+ of 32 demonstrations of role 'speaker' are longer than 20 tokens"
    with pytest.raises(ConfigError, match=expected):
        config_flags.recipe_module(cfg.recipe).make(cfg)
    assert config_flags.load("magrpo:reference_game").sft.min_fitting == 0.9


@pytest.mark.parametrize("hint", ["model", "human"])
def test_two_steps_of_the_tiny_configuration(hint, tmp_path):
    """With a hint by a rule the speaker never acts, and the listener learns alone."""
    cfg = config_flags.load("magrpo:reference_game_tiny", [("env.args.hint", hint)])
    recipe = config_flags.recipe_module(cfg.recipe).make(cfg)
    state = loop.fit(cfg, recipe, tmp_path)
    recipe.env_runner.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    turns = 2 if hint == "model" else 1
    assert int(state.step) == 4 and [row["count/invalid"] for row in rows[2:]] == [0, 0]
    assert [row["count/sequences"] for row in rows[2:]] == [4 * turns] * 2
    assert [role for role in game.ROLES if f"agent/{role}/length" in rows[2]] == [*game.ROLES][2 - turns :]
    assert rows[0]["sft/nll"] > 0
    assert rows[2]["place/none"] == 1 - rows[2]["reward/named"] and rows[2]["eval/hint_words"] <= 4
