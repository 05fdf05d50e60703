"""The card of an exported model: its figures are those of the checkpoint, and its code loads it."""

from __future__ import annotations

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.telemetry.model_card import loading, model_card

CFG = from_dict(grpo.Config, {"env": {"name": "matrix"}, "reward": {"payoff": 0.5}, "steps": 20, "seed": 3})
ROWS = [
    {"step": 1, "eval/success": 0.25, "eval/return": None},
    {"step": 11, "eval/success": 0.5, "reward/total": 0.1},
    {"step": 20, "final/success": 0.75},
]


def written(step, rows=ROWS, roles=("row", "column")):
    return model_card("shared", roles, CFG, step, rows, loading(adapter=False))


def test_figures_are_of_the_exported_step():
    assert "| success | 0.250 | 0 steps | 0.750 | 20 steps |" in written(20)
    assert "| success | 0.250 | 0 steps | 0.500 | 10 steps |" in written(10)
    assert "| success | 0.250 | 0 steps | 0.250 | 0 steps |" in written(9)
    assert "The run has no evaluation." in written(20, [{"step": 1, "reward/total": 1.0}])
    assert "return" not in written(20)  # it was not finite


def test_settings_and_roles_are_named():
    text = written(20)
    assert "| `seed` | 3 |" in text and "| `env.name` | matrix |" in text and "0.5 x payoff" in text
    assert "the roles `row` and `column`" in text and "the role `row`." in written(20, roles=("row",))
    assert text.startswith("---\nlibrary_name: transformers\n") and "grpo]" in text


def test_the_code_of_both_forms_is_python():
    for adapter in (False, True):
        compile(loading(adapter), "card", "exec")
    assert "AutoPeftModelForCausalLM" in loading(True) and "peft" not in loading(False)
