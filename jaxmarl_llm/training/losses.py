"""Losses on token log-probabilities, to be minimised: policy gradients, preferences, and a user's own function.

All averaging lives in ``weights`` (`aggregation_weights` of the whole batch). Losses, gradients and metrics of
micro-batches are therefore sums, however the batch is split. A token of weight 0 is masked: no value of its other
arrays, NaN included, changes the loss or the gradient. No function here calls a model.

`Loss` is the configuration. `RowLoss` is the interface of a loss function; ``Loss.objective`` names one. `Aggregation`
is the interface of a function that weighs tokens; ``Loss.aggregation`` names one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import at_least, finite, load_object, one_of, positive
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Array

# Log-ratios are clipped to [-20, 20], so that no ratio overflows. Beyond, their gradient is 0 (verl clips them alike).
MAX_LOG_RATIO = 20.0
EPOCH_LIMIT = 2**10  # optimizer steps on one batch
KINDS = ("token", "sequence", "sum", "constant")  # of `aggregation_weights`

F = TypeVar("F", bound=Callable[..., Any])
Unit = Literal["token", "sequence", "group"]
UNIT_AXES: dict[str, int] = {"group": 1, "sequence": 2, "token": 3}  # leading axes of [N G R] that count units


@dataclass(frozen=True)
class Loss:
    """Configuration of the loss: the function that is minimised, its constants, and how tokens are averaged.

    See `policy_loss`, `dpo`, `RowLoss` and `aggregation_weights`.
    """

    # policy: the policy gradient. dpo: preferences between siblings, by the sign of the advantage.
    # package.module:function: a user's `RowLoss`.
    objective: str = "policy"
    beta: float = 0.1  # inverse temperature of dpo
    clip_low: float | None = 0.2  # ratios below 1 - clip_low are clipped; None: no clip, and clip_high is unused
    clip_high: float = 0.2  # ratios above 1 + clip_high are clipped
    dual_clip: float | None = None  # lower bound of the objective where A < 0, in units of A; above 1, or None
    ratio_level: str = "token"  # of the importance ratio: token or sequence (GSPO; ReMA's turn)
    # token, sequence, sum or constant: see `aggregation_weights`. package.module:function: a user's `Aggregation`.
    aggregation: str = "token"
    loss_length: float | None = None  # tokens L, for aggregation=constant
    kl_coef: float = 0.0  # coefficient of the KL term to the reference policy
    kl_kind: str = "k3"  # estimator of the KL term: k1, k2 or k3
    tis_clip: float | None = None  # cap of the importance weight between sampler and learner; None: no weight
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    value_coef: float = 0.0  # coefficient of the squared error of a value head
    value_clip: float | None = None  # largest counted change of a value from the one before the update (PPO)
    # Optimizer steps on one batch, at most EPOCH_LIMIT. With more than one, ratios are to the policy before the first.
    epochs: int = 1

    ALIASES: ClassVar[dict[str, str]] = {
        "level": "ratio_level",
        "aggregate": "aggregation",
        "importance_cap": "tis_clip",
        "constant": "loss_length",
    }
    REMOVED: ClassVar[dict[str, str]] = {
        "max_log_ratio": "recipe rema caps log-ratios with config.loss.objective='jaxmarl_llm.recipes.rema:turn_loss'",
    }

    def check(self, path: str) -> None:
        self._check_objective(path)
        one_of(f"{path}.ratio_level", self.ratio_level, ("token", "sequence"))
        self._check_aggregation(path)
        one_of(f"{path}.kl_kind", self.kl_kind, ("k1", "k2", "k3"))
        positive(f"{path}.beta", self.beta)
        for name in ("loss_length", "tis_clip", "value_clip"):
            if getattr(self, name) is not None:
                positive(f"{path}.{name}", getattr(self, name))
        for name in ("clip_high", "kl_coef", "value_coef"):
            at_least(f"{path}.{name}", getattr(self, name), 0)
        finite(f"{path}.entropy_coef", self.entropy_coef)
        if self.clip_low is not None:
            at_least(f"{path}.clip_low", self.clip_low, 0)
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ConfigError(f"{path}.dual_clip: expected a finite number > 1 or None, got {self.dual_clip}")
        if self.aggregation == "constant" and self.loss_length is None:
            raise ConfigError(f"{path}.loss_length: expected tokens > 0 with {path}.aggregation='constant', got None")
        at_least(f"{path}.epochs", self.epochs, 1, EPOCH_LIMIT)
        if self.objective == "dpo":
            self._check_dpo(path)

    def _check_objective(self, path: str) -> None:
        key = f"{path}.objective"
        if ":" not in self.objective:
            one_of(key, self.objective, BUILT_IN)
        unit = _declared(find_loss(self.objective, key), "unit", "group", self)
        if unit not in UNIT_AXES:
            raise ConfigError(f"{key}: {self.objective!r}: unit: expected token, sequence or group, got {unit!r}")

    def _check_aggregation(self, path: str) -> None:
        key = f"{path}.aggregation"
        if self.aggregation == "trajectory":
            ours = "'jaxmarl_llm.recipes.rema:mean_over_turns' or 'jaxmarl_llm.recipes.rema:mean_over_tokens'"
            raise ConfigError(f"{key}: value 'trajectory' was removed; set {ours} (the former 'trajectory')")
        if not self.reads_episodes:
            one_of(key, self.aggregation, KINDS)
        else:
            find_aggregation(self.aggregation, key)

    def _check_dpo(self, path: str) -> None:
        if self.aggregation != "sum":
            raise ConfigError(
                f"{path}.aggregation: expected 'sum' with {path}.objective='dpo', got {self.aggregation!r}"
            )
        for name, value in {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef}.items():
            if value:
                raise ConfigError(f"{path}.{name}: expected 0 with {path}.objective='dpo', got {value}")
        if self.tis_clip is not None:
            raise ConfigError(f"{path}.tis_clip: expected None with {path}.objective='dpo', got {self.tis_clip}")

    @property
    def function(self) -> RowLoss:
        """The loss function that ``objective`` names."""
        return find_loss(self.objective)

    @property
    def reads_episodes(self) -> bool:
        """Whether ``aggregation`` names an `Aggregation`, which reads the episode of each sequence."""
        return ":" in self.aggregation

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probs of the reference policy: it declares so, or ``kl_coef`` is not 0."""
        return bool(self.kl_coef) or bool(_declared(self.function, "needs_reference", False, self))

    @property
    def unit(self) -> Unit:
        """The smallest part of a batch [N G R] whose loss does not depend on the rest; see `RowLoss`."""
        unit = _declared(self.function, "unit", "group", self)
        if unit not in UNIT_AXES:
            raise ConfigError(f"config.loss.objective: unit: expected token, sequence or group, got {unit!r}")
        return unit

    @property
    def clip(self) -> tuple[float, float] | None:
        """Distances of the clip range below and above ratio 1, or None without a clip."""
        return None if self.clip_low is None else (self.clip_low, self.clip_high)


class RowData(NamedTuple):
    """Data that a loss of rows reads beside log-probs and entropies. All arrays have the shape of the log-probs."""

    weights: jax.Array  # weight of each token in the batch's loss; 0 is masked
    advantages: jax.Array
    sampler_logprobs: jax.Array  # log-probs that the sampler recorded
    old: jax.Array | None  # log-probs of the policy before the first of several epochs; None with one epoch
    reference: jax.Array | None  # log-probs of the reference policy, where `Loss.needs_reference`
    imitation: jax.Array | None = None  # weight of each token's likelihood, see `row_loss`; None without imitation


@runtime_checkable
class RowLoss(Protocol):
    """Interface of a loss function: sums the loss over rows of sampled tokens.

    A user's function is named by ``Loss.objective``: ``"package.module:function"``. The module must be importable: in
    an installed package, or in a folder of PYTHONPATH. The function may carry two attributes. Each is a value, or a
    function of the `Loss`. Set them by assignment or with the decorator `loss_properties`:

    - ``unit``: the smallest part of a batch [N G R] whose loss does not depend on the rest. ``"token"``: the loss is a
      sum over tokens. ``"sequence"``: a sum over completions, whose tokens may interact. ``"group"`` (the default,
      always correct): a sum over nodes, whose G completions may interact. A smaller unit needs less memory.
    - ``needs_reference``: True if the function reads ``data.reference``. False is the default; the reference is also
      there wherever ``Loss.kl_coef`` is not 0.

    Value and metrics must add up over units: the function is called on parts of a batch and the results are summed.
    The leading axes of its arrays number the units in any layout: unit ``"token"`` sees shapes [...], ``"sequence"``
    [... R], ``"group"`` [... G R]. The function must be pure and traceable by JAX.
    """

    def __call__(
        self, loss: Loss, logprobs: jax.Array, entropy: jax.Array, data: RowData, /
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute the loss of some rows.

        Args:
            loss: the configuration.
            logprobs: log-prob of each sampled token, float32. Carries gradient.
            entropy: entropy in nats of the distribution of each token, float32. Carries gradient.
            data: the other arrays of the same rows. A token of weight 0 is masked and may hold NaN.

        Returns:
            The loss, a scalar, and metrics, scalar arrays by name. ``metrics["weight"]`` is required: means of the
            other metrics are their sums divided by its sum. The names loss, nll and value_loss are reserved.
        """
        ...


def loss_properties(
    *, unit: Unit | Callable[[Loss], Unit] = "group", needs_reference: bool | Callable[[Loss], bool] = False
) -> Callable[[F], F]:
    """Make a decorator that sets the attributes of a `RowLoss`.

    Args:
        unit: the smallest part of a batch whose loss does not depend on the rest.
        needs_reference: whether the function reads ``data.reference``.
    """

    def decorate(function: F) -> F:
        vars(function).update(unit=unit, needs_reference=needs_reference)
        return function

    return decorate


@runtime_checkable
class Aggregation(Protocol):
    """Interface of a function that weighs the tokens of a batch.

    A user's function is named by ``Loss.aggregation``: ``"package.module:function"``. The host driver and compiled runs
    call the same function, once for each model and batch. The tables are those of the whole batch, with padding.
    The function must be pure and traceable by JAX.
    """

    def __call__(
        self, mask: Bool[Array, " C R"], counted: Float[Array, " C"], episode: Int[Array, " C"], /
    ) -> Float[jax.Array, " C R"]:
        """Compute the weight of each token in the batch's loss.

        Args:
            mask: True at the tokens that the policy sampled. A sequence is one completion, that is one turn of a role.
            counted: 1 for the sequences of this batch. 0 leaves a sequence out: it is invalid, not selected, or of
                another model.
            episode: episode of each sequence: ids in [0, number of sequences), in any order.

        Returns:
            Weights, at least 0, in the shape of ``mask``. They must be 0 where ``mask`` is False or ``counted`` is 0.
            Metrics are means by these weights, so weights usually add up to 1.
        """
        ...


def _declared(function: RowLoss, name: str, default: Any, loss: Loss) -> Any:
    """Read an attribute of a loss function, which is a value or a function of the configuration."""
    value = getattr(function, name, default)
    return value(loss) if callable(value) else value


@functools.cache
def find_loss(objective: str, key: str = "config.loss.objective") -> RowLoss:
    """Find the loss function of a name. Raises a `ConfigError` of one line where there is none.

    Args:
        objective: a name in `BUILT_IN`, or ``"package.module:function"``.
        key: dotted name of the config value, for error messages.
    """
    if objective in BUILT_IN:
        return BUILT_IN[objective]
    function = load_object(key, objective)
    try:
        inspect.signature(function).bind(None, None, None, None)
    except (TypeError, ValueError) as error:
        wanted = "expected a function of (loss, logprobs, entropy, data)"
        raise ConfigError(f"{key}: {objective!r}: {wanted}: {error}") from error
    return function


@functools.cache
def find_aggregation(aggregation: str, key: str = "config.loss.aggregation") -> Aggregation:
    """Find the `Aggregation` of a name. Raises a `ConfigError` of one line where there is none.

    Args:
        aggregation: ``"package.module:function"``.
        key: dotted name of the config value, for error messages.
    """
    function = load_object(key, aggregation)
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        wanted = "expected a function of (mask, counted, episode)"
        raise ConfigError(f"{key}: {aggregation!r}: {wanted}: {error}") from error
    return function


def value_loss(
    value: Float[jax.Array, "*batch"],
    target: Float[Array, "*batch"],
    weights: Float[Array, "*batch"],
    old: Float[Array, "*batch"] | None = None,
    clip: float | None = None,
) -> Float[jax.Array, ""]:
    """Weighted squared error of values, clipped as in PPO: ``sum_i w_i max((v_i - t_i)^2, (c_i - t_i)^2)``.

    Here ``c_i = clip(v_i, old_i - clip, old_i + clip)``. Without ``clip`` the first square stands alone.

    Args:
        value: estimates v of the value head. They alone carry gradient.
        target: values t to regress to.
        weights: weight w of each entry; 0 masks it.
        old: estimates before the update. Needed with ``clip``.
        clip: largest counted change of a value, or None.
    """
    weights = jax.lax.stop_gradient(weights)
    mask = weights > 0
    v, target = jnp.where(mask, value, 0.0), jax.lax.stop_gradient(jnp.where(mask, target, 0.0))
    error = (v - target) ** 2
    if clip is not None:
        if old is None:
            raise ValueError("clip needs the old values")
        near = jnp.clip(v, old - clip, old + clip)
        error = jnp.where(mask, jnp.maximum(error, (near - target) ** 2), 0.0)
    return jnp.sum(weights * error)


def aggregation_weights(
    mask: Bool[Array, "*batch R"],
    sequence_weight: Float[Array, "*batch"],
    kind: str,
    loss_length: float | None = None,
    episode: Int[Array, "*batch"] | None = None,
) -> Float[jax.Array, "*batch R"]:
    """Compute the weight of each token in the batch's loss.

    With N sequences of |s| tokens each, the mask m, and all sequence weights 1, the kinds are:

    - ``token``: ``m / sum(m)``. Every token has the same weight (DAPO).
    - ``sequence``: ``m / (N |s|)``. The mean over sequences of the token mean (GRPO, GSPO).
    - ``sum``: ``m / N``. The mean over sequences of the summed loss (MAGRPO eq. 3: log pi of a response is a sum).
    - ``constant``: ``m / (N loss_length)``. Like ``sum``, divided by a fixed length (Dr. GRPO).
    - ``package.module:function``: the weights that an `Aggregation` computes.

    A sequence without tokens is not counted in N. If no sequence is left, all weights are 0.

    Args:
        mask: True at the tokens that the policy sampled.
        sequence_weight: factor of each sequence, in numerator and denominator alike. 0 leaves the sequence out
            (invalid, not selected, or of another model).
        kind: one of the names above.
        loss_length: the fixed length in tokens, for ``kind="constant"``.
        episode: episode of each sequence, for an `Aggregation`: ids in [0, number of sequences), in any order. None:
            each sequence is an episode of its own.
    """
    if ":" in kind:
        return _user_weights(kind, mask, sequence_weight, episode)
    tokens = mask * sequence_weight[..., None].astype(jnp.float32)
    length = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    sequences = jnp.sum(jnp.where(length > 0, sequence_weight, 0.0), dtype=jnp.float32)
    if kind == "token":
        total = jnp.sum(tokens)
    elif kind == "sequence":
        tokens, total = tokens / jnp.maximum(length, 1.0)[..., None], sequences
    elif kind == "sum":
        total = sequences
    elif kind == "constant":
        if loss_length is None or loss_length <= 0:
            raise ValueError(f"kind 'constant' needs a positive loss_length, not {loss_length}")
        total = sequences * loss_length
    else:
        raise ValueError(f"kind is {', '.join(map(repr, KINDS))} or 'package.module:function', not {kind!r}")
    return jnp.where(total > 0, tokens / jnp.where(total > 0, total, 1.0), 0.0)


def _user_weights(name: str, mask: Array, sequence_weight: Array, episode: Array | None) -> jax.Array:
    """Call the `Aggregation` of a name. Raises `ConfigError` if the result has another form."""
    rows = jnp.asarray(mask).reshape(-1, mask.shape[-1])
    counted = jnp.asarray(sequence_weight, jnp.float32).reshape(-1)
    episode = jnp.arange(counted.size) if episode is None else jnp.asarray(episode).reshape(-1)
    weights = find_aggregation(name)(rows, counted, episode)
    if not isinstance(weights, jax.Array) or weights.shape != rows.shape:
        raise ConfigError(f"config.loss.aggregation: {name!r}: expected an array of the shape of the mask [C R]")
    # A token that is masked, or of a sequence that is left out, is never trained.
    weights = jnp.where(rows & (counted > 0)[:, None], weights.astype(jnp.float32), 0.0)
    return weights.reshape(mask.shape)


def kl(logp: Float[jax.Array, "*shape"], ref_logp: Float[jax.Array, "*shape"], kind: str) -> Float[jax.Array, "*shape"]:
    """Estimate KL(pi || ref) from one token sampled from pi (Schulman 2020). Below, d = log ref - log pi.

    - ``k1``: ``-d``. Unbiased, may be negative. Useless as a loss term: its gradient is 0 in expectation.
    - ``k2``: ``d^2 / 2``. Biased, never negative. Its gradient is that of KL(pi || ref) in expectation.
    - ``k3``: ``exp(d) - d - 1``. Unbiased, never negative (DeepSeekMath eq. 4). As a loss term its gradient is in
      expectation that of the other divergence, KL(ref || pi). The two agree to first order around pi = ref.

    The gradients (Tang and Munos 2025) hold for samples of the current policy. k3 overflows for d above 88.

    Args:
        logp: log-probs of the sampled tokens under pi.
        ref_logp: log-probs of the same tokens under the reference policy.
        kind: ``k1``, ``k2`` or ``k3``.
    """
    d = ref_logp - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d**2
    if kind == "k3":
        return jnp.expm1(d) - d
    raise ValueError(f"kind is 'k1', 'k2' or 'k3', not {kind!r}")


def log_ratios(
    logprobs: Float[jax.Array, "*batch R"],
    old_logprobs: Float[jax.Array, "*batch R"],
    mask: Bool[jax.Array, "*batch R"],
    level: str,
) -> Float[jax.Array, "*batch R"]:
    """Compute the log importance ratio of each token, clipped to [-20, 20], so that no ratio overflows.

    Args:
        logprobs: log-probs of the sampled tokens under pi.
        old_logprobs: log-probs of the same tokens under the policy that sampled them.
        mask: True at the tokens that count.
        level: ``token``, or ``sequence``: every token of a sequence has the mean of the sequence's log-ratios.
    """
    ratios = logprobs - old_logprobs
    if level == "sequence":
        total = jnp.sum(jnp.where(mask, ratios, 0.0), axis=-1, keepdims=True)
        count = jnp.sum(mask, axis=-1, keepdims=True, dtype=ratios.dtype)
        ratios = jnp.where(mask, total / jnp.maximum(count, 1.0), 0.0)
    elif level != "token":
        raise ValueError(f"level is 'token' or 'sequence', not {level!r}")
    return jnp.clip(ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_unit(loss: Loss) -> Unit:
    """The unit of `policy_loss`: a ratio of a whole sequence couples the tokens of the sequence.

    Args:
        loss: its ``ratio_level`` is read.
    """
    return "sequence" if loss.ratio_level == "sequence" else "token"


@loss_properties(unit=ratio_unit)
def policy_loss(
    loss: Loss,
    logprobs: Float[jax.Array, "*rows"],
    entropy: Float[jax.Array, "*rows"],
    data: RowData,
    *,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> tuple[Float[jax.Array, ""], dict[str, Float[jax.Array, ""]]]:
    """Compute the clipped policy-gradient loss with its KL and entropy terms.

        ``sum_t w_t (-iw_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef kl_t
        - entropy_coef H_t)``

    rho is the importance ratio ``pi / pi_old``. Level ``token``: one ratio per token (PPO, GRPO). Level ``sequence``:
    GSPO eq. 6, the geometric mean of the token ratios of a sequence, not their product; it goes with weights of kind
    ``sequence``.

    Without ``data.old``, pi_old is ``logprobs`` itself: the ratio is 1 and the gradient is that of REINFORCE,
    A grad log pi, on whatever data. MAGRPO eq. 3 is this with ``clip_low=None`` and weights of kind ``sum``.

    ``clip_low`` and ``clip_high`` differ in DAPO's clip-higher. With ``dual_clip`` the objective is at least
    ``dual_clip * A`` where A < 0 (ReMA and MARSHAL: 3).

    With ``tis_clip`` each token has the constant weight ``iw = min(pi_old / sampler, tis_clip)``
    (truncated importance sampling), for a sampler that differs from pi_old. Otherwise iw is 1.

    Args:
        loss: constants of the formula.
        logprobs: log-prob of each sampled token under pi. Carries gradient.
        entropy: entropy H of each token's distribution. Carries gradient.
        data: weights w, advantages A, and log-probs of sampler, old policy and reference policy.
        max_log_ratio: log rho is at most this, for a loss of one's own that calls this one (`recipes.rema.turn_loss`).

    Returns:
        The loss and metrics. Metrics are sums over tokens weighted by w and add over micro-batches as the loss does.
        ``weight`` is the sum of w: divide by it for means (it is 1 over a batch with weights of kind token or
        sequence). ``clip_fraction`` counts tokens whose objective a clip changed. ``approx_kl`` is k3 of
        KL(pi_old || pi). ref_kl appears with a reference, importance_weight and tis_clipped with ``tis_clip``.
    """
    if loss.kl_coef and data.reference is None:
        raise ValueError("kl_coef needs log-probs of the reference policy")
    weights = jax.lax.stop_gradient(data.weights)
    mask = weights > 0
    constant = lambda x: jax.lax.stop_gradient(masked(mask, x))
    weighted = lambda x: jnp.sum(weights * x)

    logp = masked(mask, logprobs)
    old = jax.lax.stop_gradient(logp) if data.old is None else constant(data.old)
    advantage = constant(data.advantages)
    ratio = jnp.exp(jnp.minimum(log_ratios(logp, old, mask, loss.ratio_level), max_log_ratio))
    unclipped = ratio * advantage
    objective = _clip_objective(loss, unclipped, ratio, advantage)
    metrics = {
        "weight": jnp.sum(weights),
        "ratio": weighted(ratio),
        "clip_fraction": weighted(objective != unclipped),
        "approx_kl": weighted(kl(old, logp, "k3")),
    }
    if loss.tis_clip is not None:
        full = jnp.exp(log_ratios(old, constant(data.sampler_logprobs), mask, "token"))
        importance = jnp.minimum(full, loss.tis_clip)
        objective = importance * objective
        metrics |= {"importance_weight": weighted(importance), "tis_clipped": weighted(importance < full)}
    value = -weighted(objective)
    if data.reference is not None:
        metrics["ref_kl"] = weighted(kl(logp, constant(data.reference), loss.kl_kind))
        value = value + loss.kl_coef * metrics["ref_kl"]
    metrics["entropy"] = weighted(masked(mask, entropy))
    value = value - loss.entropy_coef * metrics["entropy"]
    return value, jax.lax.stop_gradient(metrics)


def masked(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Set masked entries to 0 in float32, before any arithmetic: 0 * NaN is NaN, in gradients too.

    Args:
        mask: True at entries that count.
        x: Values of the same shape.
    """
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def _clip_objective(loss: Loss, unclipped: jax.Array, ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """Apply the clip and the dual clip of ``loss`` to the objective ``ratio * advantage``."""
    objective = unclipped
    if loss.clip is not None:
        low, high = loss.clip
        objective = jnp.minimum(objective, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantage)
    if loss.dual_clip is not None:
        objective = jnp.where(advantage < 0, jnp.maximum(objective, loss.dual_clip * advantage), objective)
    return objective


@loss_properties(unit="group", needs_reference=True)
def dpo(
    loss: Loss, logprobs: Float[jax.Array, "*rows G R"], entropy: Float[jax.Array, "*rows G R"], data: RowData
) -> tuple[Float[jax.Array, ""], dict[str, Float[jax.Array, ""]]]:
    """Compute the loss of direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7) within groups:

        ``sum_(i, j) w_ij (-log sigmoid(beta (d_i - d_j)))``, ``d_i = sum_t log pi(i_t) - log pi_ref(i_t)``

    The sum is over pairs of one group, that is of one prompt. A pair has a preferred i (a positive advantage) and a
    rejected j (a negative one). The weight of a sequence is the largest weight of its tokens; that of a pair is the sum
    of its two sequences' weights. With weights of kind ``sum`` and groups of one pair each, the loss is the mean over
    pairs. Tokens of weight 0 are masked; a sequence without other tokens is in no pair.

    Args:
        loss: ``beta`` is read, above 0.
        logprobs: log-prob of each sampled token under pi. Carries gradient.
        entropy: not read.
        data: weights, advantages and log-probs of the reference policy are read.

    Returns:
        The loss and metrics. Metrics are sums over pairs weighted by w_ij, with ``weight`` their sum: ``accuracy``
        (d_i > d_j) and ``margin`` (beta (d_i - d_j)).
    """
    if data.reference is None:
        raise ValueError("dpo needs log-probs of the reference policy")
    weights = jax.lax.stop_gradient(data.weights)
    mask = weights > 0
    gain = jnp.sum(masked(mask, logprobs) - jax.lax.stop_gradient(masked(mask, data.reference)), axis=-1)
    side = jnp.sum(jax.lax.stop_gradient(masked(mask, data.advantages)), axis=-1)
    share = jnp.max(weights, axis=-1)
    pair = (side > 0)[..., :, None] & (side < 0)[..., None, :]
    weight = jnp.where(pair, share[..., :, None] + share[..., None, :], 0.0)
    margin = loss.beta * (gain[..., :, None] - gain[..., None, :])
    weighted = lambda x: jnp.sum(weight * x)
    metrics = {"weight": jnp.sum(weight), "accuracy": weighted(margin > 0), "margin": weighted(margin)}
    return weighted(jax.nn.softplus(-margin)), jax.lax.stop_gradient(metrics)


BUILT_IN: dict[str, RowLoss] = {"policy": policy_loss, "dpo": dpo}


def row_loss(
    loss: Loss, logprobs: jax.Array, entropy: jax.Array, data: RowData
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Call the function of ``loss``, and add the metric ``nll``: ``-sum_t w_t log pi_t``.

    With ``data.imitation`` v, the value has the term ``-sum_t v_t log pi_t`` too, which is the metric ``imitation``.
    Where v is above 0, the weight w is 0: an imitated token is in no other term (`training.imitation`).

    Arguments and results are those of `RowLoss`. ``logprobs`` and ``entropy`` (nats) are of the sampled tokens.
    ``data``: the other arrays of the rows. Raises `ConfigError` if the function's result has another form.
    """
    result = loss.function(loss, logprobs, entropy, data)
    if not _is_result(result):
        raise ConfigError(
            f"config.loss.objective: {loss.objective!r}: expected the result (scalar array, dict of scalar arrays with "
            "'weight')"
        )
    value, metrics = result
    nll = -jnp.sum(data.weights * jnp.where(data.weights > 0, logprobs, 0.0))
    metrics = {**metrics, "nll": jax.lax.stop_gradient(nll)}
    if data.imitation is None:
        return value, metrics
    weights = jax.lax.stop_gradient(data.imitation)
    imitated = -jnp.sum(weights * jnp.where(weights > 0, logprobs, 0.0))
    return value + imitated, {**metrics, "imitation": jax.lax.stop_gradient(imitated)}


def _is_result(result: Any) -> bool:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict) and "weight" in result[1]):
        return False
    return all(isinstance(x, jax.Array) and x.shape == () for x in (result[0], *result[1].values()))
