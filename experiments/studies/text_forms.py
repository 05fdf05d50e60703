"""A language model plays text forms of array environments: a short training, the check of its metrics, a transcript.

    python -m experiments.studies.text_forms --env=consult_text

A recipe trains SmolLM2-135M-Instruct (`make weights`) with a LoRA for each role. There are 8 steps of stage 0 and 20
updates. The section of the environment in docs/text_forms.md is written at the end. The same command goes on with a run
that was stopped. No claim is made on the quality of the play. The run shows that the way from prompt to update works
for a real tokenizer and a real model.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from absl import flags

from experiments.studies.common import make, origin, replace_section
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli.episodes import Show, TrainedTeam, play, printable
from jaxmarl_llm.config import from_dict, nearest
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Prompt, Rewards
from jaxmarl_llm.telemetry.metrics_file import read_metrics
from jaxmarl_llm.training.config import BaseConfig

STAGE_0, UPDATES = 8, 20
WIDTH = 110  # characters of a line of a transcript
RETURN = "reward/total"


@dataclass(frozen=True)
class Form:
    """A text form and the recipe that plays it.

    Attributes:
        recipe: Name of the recipe.
        args: Arguments of the environment.
        max_prompt: Tokens of a prompt at most.
        max_new_tokens: Tokens of a completion at most.
        batch: Tasks of a step.
        group: Samples of each task.
        own: Other settings of the recipe's configuration.
        team: Other settings of the team.
    """

    recipe: str
    args: Mapping[str, Any]
    max_prompt: int
    max_new_tokens: int = 24
    batch: int = 2
    group: int = 4
    own: Mapping[str, Any] = field(default_factory=dict)
    team: Mapping[str, Any] = field(default_factory=dict)


CONSULT = dict.fromkeys(("valid", "unknown", "repeated", "malformed", "exhausted", "diagnosis", "advice"), 1.0)
FACTS = {"documents": 4, "passage_chars": 200, "kept": 2}
RECORDS = {"scored": ("coder",), "absolute": (), "reward": {"invalid": 1.0}}
MAZE = {"size": 3, "shortest": 2, "longest": 4, "moves": 4}
FORMS = {  # environment -> how it is played
    "consult_text": Form("doctor_agent", {"budgets": (3,)}, 512, own={"reward": CONSULT}),
    "chain_text": Form("rema", {"protocol": "meta", "rounds": 1}, 256),
    "maze_text": Form("magrpo", MAZE, 512, own={"reward": {"accuracy": 1.0, "progress": 1.0}}),
    "dilemma_text": Form("advantage_alignment", {"rounds": 3}, 256),
    "safety_text": Form("waltzrl", {}, 320, own={"stage_one": UPDATES // 2}),
    "facts_text": Form("mmoa_rag", FACTS, 448, 32, 1, team={"critic": "head"}),
    "programs_text": Form(
        "unitymas_o", {"reflections": 1, "program_chars": 600}, 640, 96, 1, own=RECORDS, team={"critic": "head"}
    ),
    "games_text": Form("marshal", {"games": ("kuhn_poker",)}, 256),
}
SMOLLM2 = {"path": "weights/smollm2"}


def configuration(
    name: str, backbone: Mapping[str, Any] = SMOLLM2, stage_0: int = STAGE_0, updates: int = UPDATES, **changes: Any
) -> BaseConfig:
    """The configuration of a run.

    Args:
        name: A text form of FORMS.
        backbone: Fields of `agents.team.Backbone`.
        stage_0: Steps of stage 0.
        updates: Steps of RL.
        changes: Fields of `Form` with other values.

    Raises:
        ConfigError: FORMS has no such text form, or its environment has no such argument.
    """
    if name not in FORMS:
        raise ConfigError(f"--env: no text form {name!r}; {nearest(name, FORMS)}")
    form = Form(**{**vars(FORMS[name]), **changes})
    made = {
        "steps": updates,
        "batch": form.batch,
        "group": form.group,
        "team": {
            "parameter_sharing": "lora",
            "backbone": dict(backbone),
            "lora_rank": 8,
            "max_new_tokens": form.max_new_tokens,
            **form.team,
        },
        "env": {"name": name, "args": dict(form.args), "max_prompt": form.max_prompt, "workers": 0, "eval_tasks": 4},
        "sampling": {"temperature": 0.8},
        "micro_tokens": 1536,
        "optimizer": {"learning_rate": 3e-4},
        "sft": {
            "steps": stage_0,
            "batch": 4,
            "samples": 64,
            "min_fitting": 0.25,
            "optimizer": {"learning_rate": 1e-3},
        },
        "run": {"eval_every": 0, "checkpoint_every": 2, "log_every": 1, "tensorboard": False},
        **form.own,
    }
    return from_dict(importlib.import_module(f"jaxmarl_llm.recipes.{form.recipe}").Config, made)


def train(cfg: BaseConfig, workdir: str | Path) -> tuple[float, float]:
    """Train to the last step, or go on with a run. Returns the mean return of the first and of the last update.

    Args:
        cfg: Configuration of the run.
        workdir: Folder of the run.

    Raises:
        ConfigError: A metric of a step was not finite, or the folder holds another run.
    """
    from jaxmarl_llm.runs.loop import fit

    recipe = make(cfg)
    try:
        fit(cfg, recipe, workdir)
    finally:
        recipe.env_runner.close()
    rows = read_metrics(workdir)
    check_finite(rows, str(workdir))
    returns = [row[RETURN] for row in rows if RETURN in row]
    return returns[0], returns[-1]


def check_finite(rows: Sequence[Mapping[str, float | None]], where: str) -> None:
    """Check the metrics of a run.

    Args:
        rows: Lines of metrics.jsonl, in which a number that was not finite is null.
        where: Name of the run in the message.

    Raises:
        ConfigError: A metric was not finite; the message names the first one and its step.
    """
    bad = [(row["step"], key) for row in rows for key, value in row.items() if value is None]
    if bad:
        step, key = bad[0]
        more = f", nor are {len(bad) - 1} other values" if len(bad) > 1 else ""
        raise ConfigError(f"{where}: expected finite metrics, but {key!r} of step {step} is not finite{more}")


class Transcript(Show):
    """Writes an episode down as ``lines``, each at most WIDTH characters long."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _write(self, title: str, text: str) -> None:
        self.lines += ["", f"-- {title}"] if self.lines else [f"-- {title}"]
        for line in printable(text).split("\n"):
            self.lines += textwrap.wrap(line, WIDTH, replace_whitespace=False) or [""]

    def reads(self, turn: int, role: str, prompt: Prompt, entries: list[str]) -> None:
        self._write(f"turn {turn}, {role} reads", "\n".join(f"[{m.speaker}] {m.text}" for m in prompt))

    def says(self, turn: int, role: str, text: str) -> None:
        self._write(f"turn {turn}, {role} writes", text)

    def paid(self, rewards: Rewards) -> None:
        shown = {role: {name: value for name, value in by_name.items() if value} for role, by_name in rewards.items()}
        lines = [f"{role}: {', '.join(f'{k} {v:g}' for k, v in paid.items())}" for role, paid in shown.items() if paid]
        self._write("rewards other than 0", "\n".join(lines) or "none")


def transcript(workdir: str | Path) -> str:
    """One whole episode of a trained run on its first held-out task, as text.

    Args:
        workdir: Folder of the run.
    """
    team, shown = TrainedTeam(str(workdir), "workdir"), Transcript()
    player = team.player(team.cfg.seed)
    play(team.env, team.task.held_out[0], dict.fromkeys(team.env.roles, player), team.cfg.seed, shown)
    return "\n".join(shown.lines)


def section(name: str, cfg: BaseConfig, returns: tuple[float, float], episode: str, of: Mapping[str, str]) -> str:
    """The section of a text form on the page, as Markdown.

    Args:
        name: The text form.
        cfg: Configuration of the run.
        returns: Mean returns of the first and of the last update.
        episode: An episode as text.
        of: Origin of the run, as `common.origin` returns it.
    """
    team, env = cfg.team, cfg.env
    lines = [
        f"`{of['command']}`, {of['date']}, commit `{of['commit']}`, JAX {of['jax']}, {of['machine']}.",
        "",
        f"- Recipe: `{cfg.recipe}`. Roles: {', '.join(env.roles())}. Settings of `{name}`: `{dict(env.args)}`.",
        f"- Steps: {cfg.sft.steps} of stage 0, then {cfg.steps} updates of {cfg.batch} task{'s' * (cfg.batch > 1)} and "
        f"{getattr(cfg, 'group', 1)} samples.",
        f"- Tokens: prompts of at most {env.max_prompt}, completions of at most {team.max_new_tokens}.",
        f"- Mean return: {returns[0]:.3f} in the first update, {returns[1]:.3f} in the last. All metrics are finite.",
        "- No claim on its quality. An episode of the trained model on a held-out task, sampled as in training:",
        "",
        *(f"    {line}".rstrip() for line in episode.split("\n")),
        "",
    ]
    return "\n".join(lines)


def record(name: str, cfg: BaseConfig, workdir: str | Path, page: Path) -> None:
    """Train on a text form, check the metrics, and write its section.

    Args:
        name: The text form.
        cfg: Configuration of the run.
        workdir: Folder of the run.
        page: Markdown file with the two marks of the section.

    Raises:
        ConfigError: The page has no marks, a metric is not finite, or the folder holds another run.
    """
    marks = f"<!-- {name} -->", f"<!-- /{name} -->"
    replace_section(page.read_text(), *marks, "")  # a page without marks shows before the run
    of, returns = origin(), train(cfg, workdir)
    lines = section(name, cfg, returns, transcript(workdir), of)
    page.write_text(replace_section(page.read_text(), *marks, lines))


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    name = flag_values.env
    folder = workdir or f"runs/text_forms/{name}"
    record(name, configuration(name), folder, Path(flag_values.page))


if __name__ == "__main__":
    flags.DEFINE_string("env", None, f"Text form: {', '.join(FORMS)}.", required=True)
    flags.DEFINE_string("page", "docs/text_forms.md", "Markdown file whose section is written.")
    config_flags.run(main, required=())
