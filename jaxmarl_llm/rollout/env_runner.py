"""One face for both kinds of environment: play a batch of tasks, give demonstrations, make memory entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.distributed.meshes import Layout
from jaxmarl_llm.distributed.sharding import to_rollout
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.models.rollout_cache import with_caches
from jaxmarl_llm.rollout.failures import RolloutFailure
from jaxmarl_llm.rollout.host import HostRollout
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.rollout.watching import later
from jaxmarl_llm.types import Array, Params, Policy, PyTree, Team, TrainState, Tree


class RolloutResult(NamedTuple):
    """A rollout with its texts, its failures and its figures."""

    tree: Tree  # numpy arrays
    prompt_text: Callable[[int], str]  # of a step's row
    completion_text: Callable[[int], str]
    failures: list[RolloutFailure]  # of host environments
    records: HostRollout | None  # host environments
    watched: Mapping[str, float] = {}  # figures of the environment's own, see `HostEnvRunner.play`


class Demonstrations(NamedTuple):
    """Samples of one role, padded: prompts, and what was written there."""

    tokens: np.ndarray  # [n, P]
    length: np.ndarray
    completions: np.ndarray  # [n, R], stop id included; [n, G, R] where a prompt has a group of them
    completion_length: np.ndarray  # [n], or [n, G]
    loss_mask: np.ndarray | None = None  # as completions: True at tokens that are learned; None: all of them


class EvaluationWatcher(Protocol):
    """Object that sees every evaluation of a run on its held-out tasks."""

    def batch(self, state: TrainState, suffix: str, numbers: Sequence[int], played: RolloutResult) -> None:
        """See a batch of held-out tasks.

        Args:
            state: State that is evaluated.
            suffix: Of the metrics: "" as the policy samples, ``_greedy``.
            numbers: Numbers of the tasks of the batch [n].
            played: Rollout with one episode of each task.
        """

    def end(self, state: TrainState, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """See the end of an evaluation.

        Args:
            state: State that was evaluated.
            rows: Suffix -> component -> its sum over the episode of each task, a mean over roles [n]; NaN: unknown.
        """


class EnvRunner(ABC):
    """Plays tasks of one environment with one team; ``array`` tells the kind.

    ``watcher``: called with every rollout, and whether its tasks were held out; None: nobody watches. ``evaluations``:
    sees every evaluation; None: nothing does. ``layout``: how devices are cut during generation; None: as in training.
    ``form``: what a training rollout reads in place of a model's parameters, see `models.rollout_weights`; None: them.
    ``cache_form``: the policy of its generation in place of a model's, see `models.rollout_cache`; None: that policy.
    """

    layout: Layout | None = None
    form: Callable[[Params], Params] | None = None
    cache_form: Callable[[Policy], Policy] | None = None
    watcher: Callable[[RolloutResult, bool], None] | None = None
    evaluations: EvaluationWatcher | None = None
    dropped = 0.0  # share of the demonstrations that were left out

    array: bool
    env: ArrayEnv | HostEnv
    size: int  # training tasks
    held_out: Any  # evaluation tasks: a pytree of arrays, or a list
    given: bool = False  # the environment was handed in as an object, and is not made from the configuration

    @property
    @abstractmethod
    def held_out_size(self) -> int:
        """Number of held-out tasks."""

    @abstractmethod
    def play(
        self,
        team: Team,
        params: Params,
        memory: PyTree,
        indices: Sequence[int],
        plan: Plan,
        key: jax.Array,
        sampling: Sampling,
        memory_config: MemoryConfig | None,
        *,
        version: int = 0,
        held_out: bool = False,
        assignment: Array | None = None,
    ) -> RolloutResult:
        """Play some tasks once.

        Args:
            team: Roles and models.
            params: Parameters of the team (`Model.variables`).
            memory: Memory of each role by its name; not read without ``memory_config``.
            indices: Numbers of the tasks [B].
            plan: Plan of sampling.
            key: Typed key; consumed by folding.
            sampling: Distribution of tokens.
            memory_config: Settings of the memory; None: no memory.
            version: Optimizer steps of the parameters, written into the steps table.
            held_out: Whether ``indices`` count the held-out tasks; otherwise they count the training tasks.
            assignment: Who plays which role of which task, see `rollout.make_rollout`; None: each role's own model.

        Raises:
            ConfigError: The environment lacks what the plan asks for.
        """

    def formed(self, params: Params, held_out: bool, mesh: Mesh | None = None) -> Params:
        """Parameters as a rollout reads them: in their form, and in the layout of generation.

        Args:
            params: Parameters of the team, ``{"shared": ..., "agents": ...}``.
            held_out: Whether the tasks are held out: an evaluation reads the parameters of training.
            mesh: Mesh of generation; None: they stay where they are.
        """
        form = self.form
        if held_out or form is None:
            return to_rollout(mesh, params)
        apart = self.layout is not None and self.layout.apart

        def of_model(tree: Params) -> Params:
            # Devices that train may run an update now: no second thread starts programs there.
            return form(to_rollout(mesh, tree)) if apart else to_rollout(mesh, form(tree))

        return {kind: {name: of_model(params[kind][name]) for name in params[kind]} for kind in ("shared", "agents")}

    def playing(self, team: Team, held_out: bool) -> Team:
        """The team as a rollout plays it: with caches in their form. Equal arguments give the same team.

        Args:
            team: Roles and models.
            held_out: Whether the tasks are held out: an evaluation has the caches of the models.

        Raises:
            ConfigError: The cache of a model has no such form.
        """
        return team if held_out or self.cache_form is None else with_caches(team, self.cache_form)

    @abstractmethod
    def contents(self, numbers: Sequence[int], held_out: bool) -> list[str]:
        """Hash of the content of some tasks [n], see `splits.content_hash`.

        Args:
            numbers: Numbers of the tasks [n].
            held_out: Whether ``numbers`` count the held-out tasks.
        """

    def _watched(self, played: RolloutResult, held_out: bool) -> RolloutResult:
        """``played``, after the watcher has seen it, or will see it (`watching.later`)."""
        kept = later()
        if kept is None:
            self.see(played, held_out)
        else:
            kept.append((played, held_out))
        return played

    def see(self, played: RolloutResult, held_out: bool) -> None:
        """Show a rollout to the watcher, where there is one.

        Args:
            played: The rollout.
            held_out: Whether its tasks were held out.
        """
        if self.watcher is not None:
            self.watcher(played, held_out)

    @abstractmethod
    def demonstrations(
        self, team: Team, n: int, seed: int, context: int, *, min_fitting: float = 0.0
    ) -> dict[str, Demonstrations]:
        """At most ``n`` supervised samples a role, some with up to ``context`` memory entries in the prompt.

        Samples of a host environment that are longer than a completion may be are left out, with a warning. Where less
        than the share ``min_fitting`` of a role's remain, ConfigError is raised.
        """

    @abstractmethod
    def lessons(self, team: Team, played: RolloutResult, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Memory entries for the steps ``rows``: ids [n T], lengths [n], texts."""

    entry_tokens: int
    entry_bytes: int

    def open(self) -> None:  # noqa: B027  # only host environments may have engines
        """Reach what the rollouts need beside this process. Raises ConfigError where it is away."""

    def close(self) -> None:  # noqa: B027  # only host environments hold processes
        """End the processes that the runner started."""
