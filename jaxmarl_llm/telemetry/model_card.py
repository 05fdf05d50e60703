"""Model card of an exported model: what it was trained on, how, and what it reached on held-out tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmarl_llm._version import __version__
from jaxmarl_llm.config import flatten

# Keys of the configuration that a reader looks for first.
SHOWN: tuple[str, ...] = (
    "recipe",
    "seed",
    "steps",
    "batch",
    "group",
    "env.name",
    "team.backbone.path",
    "team.parameter_sharing",
)
SHOWN += ("optimizer.name", "optimizer.learning_rate", "sft.steps", "sampling.temperature")


def model_card(
    name: str, roles: Sequence[str], cfg: Any, step: int, rows: Sequence[Mapping[str, Any]], how: str
) -> str:
    """Write a README.md as model hubs show it.

    Args:
        name: Of the model.
        roles: That the model plays.
        cfg: Configuration of the run.
        step: Completed steps of the exported checkpoint.
        rows: Metrics of the run, one a step; those after ``step`` are left out.
        how: Python code that loads the model.
    """
    flat = {key.removeprefix("config."): value for key, value in flatten(cfg).items()}
    settings = "\n".join(f"| `{key}` | {flat[key]} |" for key in SHOWN if flat.get(key) is not None)
    weights = [f"{value:g} x {key.removeprefix('reward.')}" for key, value in flat.items() if key.startswith("reward.")]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [multi-agent, reinforcement-learning, jaxmarl_llm, {flat["recipe"]}]
---

# {name}

One model of a team of language models. It plays {_listed(roles)}. jaxmarl_llm {__version__} trained the team together
with the recipe `{flat["recipe"]}` on `{flat["env.name"]}`. Alone, outside of its role, the model was not trained.

```python
{how}
```

## Training

{step} steps. The reward is {", ".join(weights) or "that of the environment"}. config.json of the run has every setting.

| setting | value |
| --- | --- |
{settings}

## Held-out tasks

{_evaluations(step, rows)}
"""


def _listed(roles: Sequence[str]) -> str:
    named = [f"`{role}`" for role in roles]
    return f"the role {named[0]}" if len(named) == 1 else f"the roles {', '.join(named[:-1])} and {named[-1]}"


def _evaluations(step: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the first and the newest evaluation until ``step``."""
    seen: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            kind, _, name = key.partition("/")
            done = row["step"] - (kind == "eval")  # an evaluation during the run comes before its step
            if kind in ("eval", "final") and value is not None and done <= step:
                seen.setdefault(name, []).append((done, value))
    if not seen:
        return "The run has no evaluation."
    lines = ["| metric of the team | first | after | newest | after |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, points in seen.items():
        (first, before), (last, after) = points[0], points[-1]
        lines.append(f"| {name} | {before:.3f} | {first} steps | {after:.3f} | {last} steps |")
    return "\n".join(lines)


def loading(adapter: bool, model: str = ".", base: str = "../base") -> str:
    """Python code that loads an exported model.

    Args:
        adapter: Whether it is an adapter beside a backbone.
        model: Folder or hub name of the model.
        base: Folder or hub name of the backbone of an adapter. Other models do not need it.
    """
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    source = model
    if adapter:
        lines = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer", ""]
        source = base
    if model == ".":
        lines.insert(0, "# run in this folder")
    kind = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    lines += [f'model = {kind}.from_pretrained("{model}")', f'tokenizer = AutoTokenizer.from_pretrained("{source}")']
    return "\n".join(lines)


def team_card(models: Mapping[str, str], roles: Mapping[str, Mapping[str, Any]], cfg: Any) -> str:
    """Write the README.md of a whole team: which model plays which role.

    Args:
        models: Folder or hub name of each model.
        roles: By role, its ``model``.
        cfg: Configuration of the run.
    """
    rows = [f"| `{role}` | `{models[of['model']]}` |" for role, of in roles.items() if of["model"] in models]
    return f"""---
tags: [multi-agent, reinforcement-learning, jaxmarl_llm, {cfg.recipe}]
---

# A team of language models

jaxmarl_llm {__version__} trained the models together with the recipe `{cfg.recipe}` on `{cfg.env.name}`. team.json has
the length limit and the memory of each role.

| role | model |
| --- | --- |
""" + "".join(f"{row}\n" for row in rows)
