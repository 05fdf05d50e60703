"""The nouns: dimension letters and every pytree or bundle of functions that crosses a file.

Dimension letters, used in shape annotations, einsums and comments:

    A agents (roles)   B tasks          N nodes        C steps (completions)   J transitions
    W seats            G samples a node M turns        T tokens                P prompt tokens
    R response tokens  S cache slots    L layers       D model                 F feed-forward
    Q query heads      K key/value heads               H head size             V vocabulary
    E memory entries   X retrieved entries

Everything the learner sees is a forest in three flat tables. A *node* is a decision point: one role, one prompt, at one
place of an episode. A *step* is one completion sampled at a node. The steps of a node are siblings: they share its
prompt and form the group of every group-relative estimator. A *transition* is a joint action: one step for each seat
(each role that acts at once) of one environment state. Rewards belong to transitions, one value per role and component.
A move of one agent may pay another, and a completion may take part in several joint actions.

Tables are padded to a bucket; ``valid`` is False on padding and on everything that must stay out of statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.kernels.head.head import Head, logits

Params = Any  # a tree of arrays
PyTree = Any
# A column of a table, or a field of a batch. Compiled programs make JAX arrays; host code makes and reads NumPy arrays.
Array = jax.Array | np.ndarray

# Who produced a step (``Steps.source``): a model that learns, one that does not, a function of the prompt
# (``Model.scripted``), an expert in place of a model (`Observation.expert`), or a menu that the policy scores
# (`plans.menu`).
POLICY, FROZEN, SCRIPTED, EXPERT, MENU = range(5)


class Retrieval(struct.PyTreeNode):
    """Memory entries that each node read. X = 0 without memory."""

    slots: Int[Array, "N X"]  # -1 for none
    similarity: Float[Array, "N X"]
    query: Float[Array, "N D"]  # embedding of the prompt before entries were added
    added: Int[Array, " N"]  # tokens that memory put in front of the prompt

    @staticmethod
    def empty(n: int) -> Retrieval:
        none = jnp.zeros((n, 0))
        return Retrieval(none.astype(jnp.int32), none, none, jnp.zeros((n,), jnp.int32))


class Nodes(struct.PyTreeNode):
    """Decision points. Leading axis N."""

    tokens: Int[Array, "N P"]  # prompt ids, right-padded
    length: Int[Array, " N"]
    role: Int[Array, " N"]  # index into Team.roles
    model: Int[Array, " N"]  # index into Team.models
    task: Int[Array, " N"]  # index into the batch of tasks
    turn: Int[Array, " N"]
    parent: Int[Array, " N"]  # transition that led here, -1 at a root
    retrieved: Retrieval  # what memory put into the prompt
    valid: Bool[Array, " N"]


class Steps(struct.PyTreeNode):
    """Completions. Leading axis C. Convention: ``logprobs[t]`` scores ``tokens[t]`` given the prompt and tokens[:t]."""

    node: Int[Array, " C"]
    tokens: Int[Array, "C R"]
    length: Int[Array, " C"]  # sampled tokens, the stop id included
    # True where the policy sampled the token, or scored it in a menu; False in what an expert wrote. Never token values
    loss_mask: Bool[Array, "C R"]
    logprobs: Float[Array, "C R"]  # under the distribution really sampled from, or of the policy that scored the menu
    truncated: Bool[Array, " C"]  # ended by the length limit, not by a stop id
    source: Int[Array, " C"]
    version: Int[Array, " C"]  # optimizer steps the sampling parameters had seen
    valid: Bool[Array, " C"]


class Transitions(struct.PyTreeNode):
    """Joint actions and what they earned. Leading axis J."""

    steps: Int[Array, "J W"]  # the step of each seat, -1 for an empty seat
    parent: Int[Array, " J"]  # transition that led to this state, -1 at a root
    task: Int[Array, " J"]
    turn: Int[Array, " J"]
    rewards: Mapping[str, Float[Array, "J A"]]  # by component
    done: Bool[Array, " J"]
    played: Bool[Array, " J"]  # the environment was stepped
    valid: Bool[Array, " J"]  # played, and its reward could be computed


class Counts(struct.PyTreeNode):
    """Costs of a rollout, counted while it ran (scalars)."""

    sequences: Int[Array, ""]  # completions: sampled, scored in a menu, or of experts
    branch_sequences: Int[Array, ""]  # of which at nodes where the plan branches (G > 1)
    prompt_tokens: Int[Array, ""]  # of prompts, really sent through the trunk: what was cached is not sent again
    completion_tokens: Int[Array, ""]  # of all these completions
    env_calls: Int[Array, ""]  # environment steps
    invalid: Int[Array, ""]  # transitions whose reward could not be computed
    launches: Int[Array, ""]  # generation programs started


class Tree(struct.PyTreeNode):
    """A rollout: three tables and its costs."""

    nodes: Nodes
    steps: Steps
    transitions: Transitions
    counts: Counts


@dataclass(frozen=True)
class Unembed:
    """`Policy.unembed` of a model whose logits are a linear map of its hidden states: ``head(variables) -> Head``.

    Where ``unembed`` is one of these, log-probs, losses and samples come from hidden states by the kernels
    ``head_loss`` and ``head_sample``. Any other function is called, and its logits are used.
    """

    head: Callable[[Params], Head]

    def __call__(self, variables: Params, hidden: jax.Array) -> jax.Array:
        return logits(hidden, self.head(variables))


class Policy(NamedTuple):
    """A language model as pure functions. ``variables`` is ``{"params": ...}`` or ``{"params": ..., "lora": ...}``.

    init(key) -> params
    prefill(variables, tokens [N P], length [N]) -> (hidden [N D] at the last prompt token, prefix cache)
    decode(variables, tokens, prefix, length, suffix, t) -> (hidden, suffix): one token for every sample of a launch, at
        the shared scalar position t behind its node's prompt. All but variables and t have one entry for each part of
        the launch. An entry is tokens [N G], a prefix cache, length [N], a suffix cache, or hidden [N G D]
    init_suffix(prefix, G, R) -> suffix cache
    hidden(variables, tokens [N P], length [N], completions [N G R]) -> [N G R D]: hidden state that predicts each
        completion token; the prompt of a group goes through the trunk once
    unembed(variables, hidden [... D]) -> float32 logits [... V]: an `Unembed`, or any function
    embed(variables, tokens) -> [... D]: rows of the token embedding
    unstack(variables) -> variables as `decode` takes them: cut per layer once per launch instead of once per token.
        Variables that are cut already stay as they are
    extend(variables, tokens [N E], count [N], start [N], prefix) -> (hidden [N D] at the last new token, prefix):
        ``count`` new tokens of each row stand behind ``start`` that are in the cache. Takes variables of ``unstack``,
        too. None: prompts are prefilled whole
    hidden_tree(variables, tokens [B T], position [B T], end [B T]) -> [B T D]: hidden state at each token of sequences
        that share their beginnings, laid out depth first as kernels/attention/tree takes them. None: never so packed
    draw(variables of unstack, hidden [N G D], u [N G], sampling) -> token and log-prob [N G], one uniform number each.
        None: as `sampling` draws from what ``unembed`` gives.
    decode_slots(variables, tokens, prefix, length, suffix, t, begun): as ``decode``, for nodes that begin at times of
        their own, ``begun`` [N]. The token of time t is in slot t mod R of the suffix. None: nodes begin together
    choose_adapters(variables, index [...]) -> variables in which hidden states [... D] have the adapter of ``index``,
        one of those that `lora.join_adapters` laid side by side. Also of ``unstack``. None: a launch has one adapter
    """

    config: Any
    init: Callable[[jax.Array], Params]
    prefill: Callable[..., tuple[jax.Array, PyTree]]
    decode: Callable[..., tuple[Sequence[jax.Array], PyTree]]
    init_suffix: Callable[..., PyTree]
    hidden: Callable[..., jax.Array]
    unembed: Callable[..., jax.Array]
    embed: Callable[..., jax.Array]
    unstack: Callable[..., PyTree]
    extend: Callable[..., tuple[jax.Array, PyTree]] | None = None
    hidden_tree: Callable[..., jax.Array] | None = None
    draw: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    decode_slots: Callable[..., tuple[Sequence[jax.Array], PyTree]] | None = None
    choose_adapters: Callable[[Params, jax.Array], Params] | None = None


@dataclass(frozen=True, eq=False)
class Model:
    """One set of trainable parameters: ``params["agents"][name]``, over ``params["shared"][base]`` when given.

    What is under ``agents`` is trained; what is under ``shared`` is not. Separate copies: ``base`` None and
    ``agents[name] = {"params": ...}``. LoRA per role over one backbone: ``agents[name] = {"lora": ...}``. One policy
    for several roles: those roles name the same model.

    ``scripted``: a function of the prompt plays in place of a language model, see models/scripted.py. Its steps have
    source ``SCRIPTED``.
    """

    name: str
    policy: Policy
    tokenizer: Any  # tokenizer.Tokenizer
    base: str | None = None
    scripted: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What models have in common that can sample in one program: architecture, base, stop ids and padding."""
        return self.policy, self.base, self.tokenizer.stop_ids, self.tokenizer.pad_id

    def variables(self, params: Params) -> Params:
        own = params["agents"][self.name]
        return own if self.base is None else {"params": params["shared"][self.base], **own}


@dataclass(frozen=True)
class Role:
    """A part in an episode: its name, the model that plays it, and the most tokens one completion may have.

    ``opponent_models``: models that may play it instead where a rollout's ``assignment`` says so. They share its
    tokenizer and are not trained on what they play (``FROZEN``). ``co_players``: models that play the role as often as
    its own model and learn from what they play.
    """

    name: str
    model: str
    max_new_tokens: int
    opponent_models: tuple[str, ...] = ()
    co_players: tuple[str, ...] = ()

    @property
    def players(self) -> tuple[str, ...]:
        """Models that may play the role: its own one, other models that learn it, then models that do not learn."""
        return (self.model, *self.co_players, *self.opponent_models)

    @property
    def learning(self) -> int:
        """How many of `players`, from the first one, learn from what they play."""
        return 1 + len(self.co_players)


@dataclass(frozen=True, eq=False)
class Team:
    """Roles and the models that play them. Integer columns of the tree index these tuples.

    ``critics``: by role, the model that estimates its values; empty without critics. It may be the role's own model (a
    value head) or one that plays no role. With ``joint_critic`` it reads the prompts of all seats.
    """

    roles: tuple[Role, ...]
    models: tuple[Model, ...]
    critics: tuple[str, ...] = ()
    joint_critic: bool = False
    batch_models: bool = False  # models that act together are one launch: see `rollout.make_rollout`

    def model_index(self, role: int) -> int:
        return self.players(role)[0]

    def players(self, role: int) -> tuple[int, ...]:
        """Indices of the models that may play a role, in the order of `Role.players`: an assignment counts them."""
        names = [m.name for m in self.models]
        return tuple(names.index(name) for name in self.roles[role].players)

    def role_index(self, name: str) -> int:
        return [r.name for r in self.roles].index(name)

    def model_of(self, role: int) -> Model:
        return self.models[self.model_index(role)]

    def sources(self, frozen: bool) -> tuple[int, ...]:
        """Source of the steps of each model, in the order of ``models``.

        Args:
            frozen: Whether the model does not learn from what it plays.
        """
        return tuple(SCRIPTED if model.scripted else FROZEN if frozen else POLICY for model in self.models)


class TrainState(struct.PyTreeNode):
    """All that a run is: saved, restored and resumed as one tree."""

    step: Int[Array, ""]
    key: jax.Array  # typed key, never consumed: step keys are folded from it
    params: Params  # {"shared": {base: ...}, "agents": {model: ...}}; "reference" and "past" where a run has them
    opt_state: PyTree  # {model: optimizer state}
    memory: PyTree  # {role: Memory}
    counters: PyTree  # {name: scalar}: updates per model, samples, skipped steps; and `kept`, where there is something

    @property
    def kept(self) -> Mapping[str, PyTree]:
        """Arrays that play and update functions keep of earlier steps, by name."""
        return self.counters.get("kept", {})

    def with_kept(self, kept: Mapping[str, PyTree]) -> TrainState:
        """The state with other arrays of earlier steps. Without any it has no entry for them, as earlier versions had.

        Args:
            kept: Arrays by name.
        """
        others = {name: value for name, value in self.counters.items() if name != "kept"}
        return self.replace(counters={**others, "kept": dict(kept)} if kept else others)
