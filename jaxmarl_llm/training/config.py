"""Configuration that every recipe shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxmarl_llm.agents.snapshots import Past
from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import ROW_LIMIT, at_least, finite, in_range, later, load_object, one_of
from jaxmarl_llm.credit.assign import Credit
from jaxmarl_llm.distributed.deadlines import Deadlines
from jaxmarl_llm.distributed.meshes import MeshConfig
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.engine import EngineConfig
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import rollout_cache, rollout_weights
from jaxmarl_llm.models.rollout_weights import SAME
from jaxmarl_llm.telemetry.rollouts import RolloutsConfig
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer

STALE_LIMIT = 16  # copies of the parameters that a run keeps for stale rollouts
OTHERS = "others"  # key of ``reward``: the weight of every component without a weight of its own


def weights_of(reward: Mapping[str, Any], components: Iterable[str]) -> dict[str, Any]:
    """Weights by component, with the entry ``others`` written out.

    Args:
        reward: Component -> weight, and possibly ``others`` -> weight of every component that is not named.
        components: Names of all components that the environment pays.
    """
    named = {name: weight for name, weight in reward.items() if name != OTHERS}
    if OTHERS not in reward:
        return named
    return named | {name: reward[OTHERS] for name in components if name not in named}


@dataclass(frozen=True)
class Offline:
    """Steps on samples that are there before the first of them."""

    steps: int = 0  # 0: no such steps
    batch: int = 32  # samples of each role in a step
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)

    def check(self, path: str) -> None:
        at_least(f"{path}.steps", self.steps, 0)
        at_least(f"{path}.batch", self.batch, 1, ROW_LIMIT)


@dataclass(frozen=True)
class SFT(Offline):
    """Stage 0: supervised fine-tuning of every role on its own demonstrations."""

    samples: int = 2048  # demonstrations of each role to draw from
    min_fitting: float = 0.5  # share of them that has to be no longer than team.max_new_tokens

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.samples", self.samples, 1, ROW_LIMIT)
        in_range(f"{path}.min_fitting", self.min_fitting, 0, 1)


NO_BEST = "none"  # of `RunConfig.best`


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run: checkpoints, evaluation, logs, and limits that stop the run."""

    checkpoint_every: int = 50  # steps; the last step is always saved
    keep: int = 2  # newest checkpoints that stay
    eval_every: int = 50  # steps; 0: only before and after RL
    eval_greedy: bool = True  # whether an evaluation plays at temperature 0 too, for twice the time
    log_every: int = 10  # steps between console lines; metrics.jsonl has every step
    tensorboard: bool = True  # write event files for TensorBoard to the workdir
    wandb_project: str | None = None  # project of Weights and Biases to log to (extra wandb); None: none
    trackio_project: str | None = None  # project of Trackio to log to, on this machine (extra trackio); None: none
    max_bad_steps: int = (
        10  # in a row, not finite, without anything to train, or all experts silent, before the run stops
    )
    deadlines: Deadlines = Deadlines()  # of the stages of a step
    max_logprob_diff: float = 0.05  # |sampler - learner| log-prob above which the run stops; 0 does not check
    max_invalid: float = 0.5  # share of joint actions without a valid reward above which the run ends; 1: never
    # metric of the held-out tasks, as eval/return, whose best step is kept in best/; None: eval/return where a
    # pretrained model is evaluated during RL; none: no step
    best: str | None = None
    patience: int = 0  # evaluations in a row without a better value of ``best`` after which the run ends; 0: never
    episodes: int = 6  # written to episodes.md at the end
    rollouts: RolloutsConfig = RolloutsConfig()  # which rollouts are written to rollouts/, see docs/rollouts.md
    max_epochs: float = 100.0  # passes of RL over the tasks of a host environment, above which it is refused; 0: any
    debug: bool = (
        False  # end with an error at the first value that is not finite: step, role or model, and part; slower
    )

    ALIASES: ClassVar[dict[str, str]] = {"max_logprob_gap": "max_logprob_diff"}

    def check(self, path: str) -> None:
        for name in ("checkpoint_every", "keep", "log_every", "max_bad_steps"):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        for name in ("eval_every", "max_logprob_diff", "episodes", "patience", "max_epochs"):
            at_least(f"{path}.{name}", getattr(self, name), 0)
        in_range(f"{path}.max_invalid", self.max_invalid, 0, 1)
        if self.best not in (None, NO_BEST) and not self.best.removeprefix("-").startswith("eval/"):
            raise ConfigError(
                f"{path}.best: expected a metric of the held-out tasks as eval/return, -eval/NAME where less is "
                f"better, or {NO_BEST}, got {self.best!r}"
            )
        if self.best is not None and "_greedy" in self.best and not self.eval_greedy:
            raise ConfigError(f"{path}.best: expected {path}.eval_greedy=True for {self.best!r}")
        if self.patience and not (self.best not in (None, NO_BEST) and self.eval_every):
            raise ConfigError(f"{path}.patience: expected 0 without {path}.best and {path}.eval_every")


@dataclass(frozen=True)
class BaseConfig:
    """Fields of every recipe. A recipe's Config adds its own and sets its defaults."""

    recipe: str  # a module of jaxmarl_llm.recipes, or any importable module; fixed by the configuration file
    seed: int = 0  # of initialisation, tasks and samples
    steps: int = 200  # of RL, after sft.steps of stage 0
    batch: int = 32  # tasks in a step
    team: TeamConfig = TeamConfig()
    env: EnvConfig = EnvConfig()
    sampling: Sampling = Sampling()
    engine: EngineConfig = EngineConfig()  # external engines that sample the completions of a host environment
    # component -> weight; an absent component is logged and not paid; the key others: all that are not named
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "format": 1.0, "efficiency": -1.0})
    credit: Credit = Credit()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    update: str | None = None  # package.module:function of an `UpdateFunction` of your own; None: the recipe's
    micro_tokens: int = 16_384  # trunk tokens P + G R of one micro-batch, on each device that holds rows
    sft: SFT = SFT()
    past: Past = Past()  # earlier policies as opponents
    staleness: int = later(0)  # steps that the policy of a rollout is behind the one that the step updates
    rollout_weights: str = later(SAME)  # what training rollouts read: same, int8 or fp8 (matrices of the layers)
    rollout_cache: str = later(SAME)  # keys and values that training rollouts cache: same, int8 or fp8
    mesh: MeshConfig = MeshConfig(data=1)  # devices of the run: one; data=-1 takes all
    run: RunConfig = RunConfig()

    @property
    def best_metric(self) -> str | None:
        """The metric whose best step a run keeps; None: the run keeps its newest steps alone."""
        if self.run.best is None:
            return "eval/return" if self.team.pretrained and self.run.eval_every else None
        return None if self.run.best == NO_BEST else self.run.best

    def check(self, path: str) -> None:
        for name in ("seed", "steps"):
            at_least(f"{path}.{name}", getattr(self, name), 0)
        at_least(f"{path}.batch", self.batch, 1, ROW_LIMIT)
        at_least(f"{path}.micro_tokens", self.micro_tokens, 1)
        for component, weight in self.reward.items():
            finite(f"{path}.reward.{component}", weight)
        if self.update is not None:
            load_object(f"{path}.update", self.update)
        if self.sampling.temperature == 0:
            raise ConfigError(f"{path}.sampling.temperature: expected > 0 for training, got 0")
        at_least(f"{path}.staleness", self.staleness, 0, STALE_LIMIT)
        if self.staleness and self.past.size:
            raise ConfigError(f"{path}.past.size: expected 0 with {path}.staleness, got {self.past.size}")
        if self.engine.urls and self.past.size:
            raise ConfigError(f"{path}.past.size: expected 0 with {path}.engine.urls, got {self.past.size}")
        if self.engine.urls and self.env.lanes:
            raise ConfigError(f"{path}.env.lanes: expected 0 with {path}.engine.urls, got {self.env.lanes}")
        for name, needed in {"models": "all", "rollout_blocks": 1}.items():
            if self.env.lanes and (value := getattr(self.mesh, name)) != needed:
                raise ConfigError(f"{path}.env.lanes: expected 0 with {path}.mesh.{name}={value}, got {self.env.lanes}")
        self._check_rollout_form(path, "rollout_weights", tuple(rollout_weights.FORMS))
        self._check_rollout_form(path, "rollout_cache", tuple(rollout_cache.FORMS))
        if self.past.size and self.team.critic != "none":
            raise ConfigError(
                f"{path}.past.size: expected 0 with {path}.team.critic={self.team.critic!r}, got {self.past.size}"
            )

    def _check_rollout_form(self, path: str, name: str, forms: tuple[str, ...]) -> None:
        key, form = f"{path}.{name}", getattr(self, name)
        one_of(key, form, forms)
        if form == SAME:
            return
        if self.engine.urls:
            raise ConfigError(f"{key}: expected {SAME!r} with {path}.engine.urls, got {form!r}")
        if self.mesh.context > 1:  # no test has both
            raise ConfigError(f"{key}: expected {SAME!r} with {path}.mesh.context={self.mesh.context}, got {form!r}")
        if self.loss.objective == "dpo":
            raise ConfigError(f"{key}: expected {SAME!r} with {path}.loss.objective='dpo', got {form!r}")
        if self.loss.tis_clip is None:
            raise ConfigError(
                f"{path}.loss.tis_clip: expected a cap of importance weights, as 2.0, with {key}={form!r}, got None"
            )


@dataclass(frozen=True)
class ActorCritic(BaseConfig):
    """Fields of recipes whose advantages come from critics (``team.critic``)."""

    group: int = 1  # episodes of each task
    gae_lambda: float = 0.0  # 0: TD(0); 1: Monte Carlo
    whiten: bool = True  # advantages: mean 0 and std 1 over the batch, by role and turn
    credit: Credit = Credit(
        discount=0.9, group="task_role_turn", normalise="none"
    )  # the group is for the metrics alone
    loss: Loss = Loss(clip_low=None, aggregation="sum", value_coef=0.6)
    optimizer: Optimizer = Optimizer(learning_rate=1e-4, max_grad_norm=0.5)
    critic_optimizer: Optimizer = Optimizer(learning_rate=1e-4, max_grad_norm=0.5)  # of critics that are no policies

    ALIASES: ClassVar[dict[str, str]] = {"decay": "gae_lambda"}

    def check_critic(self, path: str, critics: tuple[str, ...]) -> None:
        if self.team.critic not in critics:
            raise ConfigError(f"{path}.team.critic: expected {' or '.join(critics)}, got {self.team.critic!r}")
        at_least(f"{path}.group", self.group, 1, ROW_LIMIT)
        in_range(f"{path}.gae_lambda", self.gae_lambda, 0, 1)
        if not self.loss.value_coef:
            raise ConfigError(f"{path}.loss.value_coef: expected > 0 (nothing else trains the critic), got 0")
