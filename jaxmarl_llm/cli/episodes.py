"""One episode in the terminal, played by people, scripts or trained models; `cli.play` and `cli.chat` show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Prompt, Rewards


def printable(text: str) -> str:
    """``text`` without characters that control a terminal: a model may write any."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def nothing_recalled(role: str, prompt: Prompt) -> tuple[Prompt, list[str]]:
    """The prompt as it is, without memory entries. ``role``: not read. ``prompt``: the prompt."""
    return prompt, []


@dataclass(frozen=True)
class Player:
    """Completes the prompts of a role.

    Attributes:
        complete: (role, prompt, turn) -> completion.
        recall: (role, prompt) -> the prompt with memory entries in it, and these entries.
    """

    complete: Callable[[str, Prompt, int], Action]
    recall: Callable[[str, Prompt], tuple[Prompt, list[str]]] = nothing_recalled


class Show:
    """Shows an episode as it is played. The methods are called in the order in which they stand here."""

    def turn(self, turn: int, prompts: Mapping[str, Prompt]) -> None:
        """A turn begins. ``turn``: its number, from 0. ``prompts``: of the roles that act, before anyone writes."""

    def reads(self, turn: int, role: str, prompt: Prompt, entries: list[str]) -> None:
        """A role reads.

        Args:
            turn: Number of the turn.
            role: The role.
            prompt: Its prompt, memory entries included.
            entries: The memory entries.
        """

    def says(self, turn: int, role: str, text: str) -> None:
        """A role has written. ``turn``: number of the turn. ``role``: the role. ``text``: its completion."""

    def paid(self, rewards: Rewards) -> None:
        """The joint action was played. ``rewards``: by role and component."""

    def end(self, sums: Mapping[str, Mapping[str, float]]) -> None:
        """The episode has ended. ``sums``: of the rewards by role and component; NaN where one is unknown."""


def play(env: HostEnv, task: Any, players: Mapping[str, Player], seed: int, show: Show) -> None:
    """Play a task to its end.

    Args:
        env: The environment. Its exceptions go on.
        task: Argument of its ``reset``.
        players: Who completes the prompts of each role.
        seed: Of the environment's random numbers.
        show: Is told everything.
    """
    state, sums = env.reset(seed, task), {role: dict.fromkeys(env.components, 0.0) for role in env.roles}
    for turn in range(env.max_turns):
        prompts, actions = env.observe(state), {}
        if not prompts:
            break
        show.turn(turn, prompts)
        for role, prompt in prompts.items():
            prompt, entries = players[role].recall(role, prompt)
            show.reads(turn, role, prompt, entries)
            actions[role] = players[role].complete(role, prompt, turn)
            show.says(turn, role, actions[role].text)
        state, rewards, done = env.step(seed + turn, state, actions)
        show.paid(rewards)
        for role in env.roles:
            for component, value in rewards.get(role, {}).items():
                sums[role][component] += float("nan") if value is None else value
        if done:
            break
    show.end(sums)


class TrainedTeam:
    """A run whose models play its own environment.

    Args:
        workdir: Folder of the run.
        flag: Name of the folder in messages, as `cli.trained_run.open_run` has it.
        best: The best step of the run instead of the newest.
        step: This step instead of the newest.
        temperature: Of the models; None: that of training. 0 takes the most likely token.

    Raises:
        ConfigError: There is no such step, the temperature is out of range, or the environment is an array environment.
    """

    def __init__(
        self, workdir: str, flag: str, *, best: bool = False, step: int | None = None, temperature: float | None = None
    ) -> None:
        from jaxmarl_llm.cli.trained_run import open_run
        from jaxmarl_llm.config import at_least
        from jaxmarl_llm.rollout.host_runner import HostEnvRunner

        if temperature is not None:
            at_least("--temperature", temperature, 0)
        self.cfg, self._recipe, self._state = open_run(workdir, flag, ("1", "1", "1"), best=best, step=step)
        runner, env = self._recipe.env_runner, self._recipe.env_runner.env
        if not isinstance(runner, HostEnvRunner) or not isinstance(env, HostEnv):
            raise ConfigError(
                f"{workdir}: its environment {self.cfg.env.name!r} is an array environment, without text; see its "
                f"episodes: jaxmarl-llm view {workdir}"
            )
        self._runner, self.task, self.env = runner, runner.task, env
        hotter = {} if temperature is None else {"temperature": temperature}
        self._sampling = dataclasses.replace(self.cfg.sampling, **hotter)

    def player(self, seed: int) -> Player:
        """A player of every role, with the role's own model and memory. ``seed``: of the samples."""
        import jax
        import numpy as np

        from jaxmarl_llm.rollout.launches import GenerationRequest, TeamSampler

        team, key = self._recipe.team, jax.random.key(seed)

        def complete(role: str, prompt: Prompt, turn: int) -> Action:
            place = team.role_index(role)
            fitted = team.model_of(place).tokenizer.fit(prompt, role, self.cfg.env.max_prompt)
            drawn = np.asarray(jax.random.key_data(jax.random.fold_in(key, turn)))
            request = GenerationRequest(team.players(place)[0], 1, 0, place, drawn, fitted.ids)
            sampler = TeamSampler(team, self._state.params, self._sampling)
            ((completion,),) = sampler.sample([request], more=False)
            return completion.action

        return Player(complete, self._recall())

    def _recall(self) -> Callable[[str, Prompt], tuple[Prompt, list[str]]]:
        """The function `Player.recall` of the run's memory."""
        from jaxmarl_llm.agents.memory import decode_text
        from jaxmarl_llm.training.train_step import TrainStep

        steps = [phase.step for phase in self._recipe.phases if isinstance(phase.step, TrainStep)]
        config = steps[-1].algorithm.memory if steps else None
        if config is None:
            return nothing_recalled
        team, memory = self._recipe.team, self._state.memory
        look_up = self._runner.recall(team, self._state.params, memory, config)

        def recall(role: str, prompt: Prompt) -> tuple[Prompt, list[str]]:
            (found,), retrieved = look_up([team.role_index(role)], [prompt])
            return found, [decode_text(memory[role].text[slot]) for slot in retrieved.slots[0] if slot >= 0]

        return recall
