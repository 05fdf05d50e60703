"""Figures without a model on the sample in the package, by hand and in their order."""

from experiments.studies import text_baselines as study
from jaxmarl_llm.envs.reference_game import env as game
from jaxmarl_llm.envs.two_writers import env as writers

TASK = {"text": "Cats are old. In this work we tame them. We win.", "targets": ["We tame cats."], "id": "a"}


def test_rules_by_hand():
    assert study.sentences(TASK) == ["Cats are old.", "In this work we tame them.", "We win."]
    assert study.what_is_new(TASK) == "In this work we tame them."
    assert study.what_is_new({"text": "Cats. Dogs."}) == "Cats."
    assert study.best(TASK, "rouge1") == "In this work we tame them."
    assert study.best({**TASK, "targets": ["Win, we."]}, "rouge1") == "We win."


def test_summaries_are_in_the_order_that_is_known():
    """The last column is the reward of the configuration: ROUGE-L, half of it for a permitted length."""
    rows = dict(study.summaries(writers.Config(split="test")))
    longest = {name: means[1] for name, means in rows.items()}
    best = longest["best sentence by ROUGE-L"]
    assert longest["random sentence"] < longest['first sentence with "we" or "in this"'] < best
    assert rows["best sentence by ROUGE-1"][0] == max(means[0] for means in rows.values())
    assert abs(rows["frequent words of summaries, always the same"][2]) < 1e-9
    assert all(longest[name] / 2 <= rows[name][4] <= longest[name] for name in study.SUMMARIES)
    assert len(rows["one human against the others"]) == 4
    assert "one human against the others" not in dict(study.summaries(writers.Config(split="train")))


def test_hints_are_in_the_order_that_is_known():
    found = dict(study.hints(game.Config(split="test")))
    assert found["none"] == 0.25 < found["first words of the abstract"] < found["words of the title in the abstract"]
    page = study.markdown(None, "test")
    assert "## Summaries (32 articles, test)" in page and "## Listener by words (32 tasks, test)" in page
    assert f"| none | 0.250 | {0.25 - 0.15003:.3f} to {0.25 + 0.15003:.3f} |" in page
