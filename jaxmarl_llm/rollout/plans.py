"""Sampling plans: where a rollout branches, how often, and which joint actions are played on.

A plan is a few pure functions of a place in the tree. It knows nothing of models or environments, and the engines know
no plan by name. Its decisions are static (independent of samples). So array rollouts compile, and the number of samples
is known before anything runs. Three things may depend on rewards: *which* sample continues (``rank``), whether any does
(``stop_above``), and which state is expanded next (``choose``). Equal arguments give equal plans: what was compiled for
one is found again.

Samples of one agent for a trajectory of k turns with G per branching node:

    flat       G branches from the root                      G k            (groups at the root only)
    node_wise  G at each node of one base trajectory         k G            (+ continuations when they are played on)
    handoff    G at each node, one goes on                   k G
    product    G at every node                               G + ... + G^k  (the naive joint search: G^k leaves)
               or G_t at every node of turn t                G_1 + G_1 G_2 + ... + G_1 ... G_k
    grow       1 at each of k states, chosen in turn         k            (the root, or behind an earlier one)
    menu       every choice of a menu at one turn            k            (times the number of choices; none is sampled)

With W seats acting at once, G samples a seat make G ``aligned`` joint actions (the g-th of every seat). Or they make
G^W ``cross`` ones (each with each). A tree of crossed actions has G^(W t) states at turn t.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.types import Array

JOINT = ("aligned", "cross")

# (key, parents [k], players [k], rewards [k], n []) -> (expansion to go on from or -1, player): see `grow`
Choose = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[Array | int, Array | int]]


class Branch(NamedTuple):
    """The kind of a place in the tree: its turn, and whether the plan branches there as on a base trajectory."""

    turn: int
    trunk: bool


class Plan(NamedTuple):
    """width(branch) -> samples of each seat there. follow(branch, j) -> where the j-th joint action leads, None: not
    played on.

    ``local``: every transition is scored by the environment's local verifier instead of by playing on.
    ``joint``: how the samples of seats that act at once are combined, ``aligned`` or ``cross``.
    ``rank``: joint actions are numbered for ``follow`` as sampled (False), or from the best team reward down.
    ``stop_above``: a state whose joint actions' mean team reward is above it is not played on at all (None: never).
    ``reward``: (component, weight) pairs of the team reward that ``rank``, ``stop_above`` and ``choose`` read.
    ``turns``: the number of turns of the environments that the plan is for; None: any.
    ``choose``: the state that each turn expands, and its player, see `grow`; None: ``follow`` says what is played.
    ``menu``: menu(branch) -> texts that are the siblings of every node there, see `menu`; none: they are sampled.
    """

    name: str
    width: Callable[[Branch], int]
    follow: Callable[[Branch, int], Branch | None]
    local: bool = False
    joint: str = "aligned"
    rank: bool = False
    stop_above: float | None = None
    reward: tuple[tuple[str, float], ...] = ()
    turns: int | None = None
    choose: Choose | None = None
    menu: Callable[[Branch], tuple[str, ...]] | None = None

    def choices(self, branch: Branch) -> tuple[str, ...]:
        """The menu of the nodes of ``branch``; empty where completions are sampled."""
        return () if self.menu is None else self.menu(branch)

    def actions(self, branch: Branch, seats: int) -> tuple[tuple[int, ...], ...]:
        """The joint actions at a state of ``seats`` seats, each the sample index of every seat. In order."""
        g = range(self.width(branch))
        return tuple(itertools.product(g, repeat=seats)) if self.joint == "cross" else tuple((i,) * seats for i in g)

    def check(self, env: ArrayEnv | HostEnv) -> None:
        """Raises ConfigError when ``env`` lacks what the plan needs.

        That is a local verifier, a component of ``reward``, or as many turns as the plan has widths or expansions. A
        plan that grows needs the same roles at every turn, because it may expand any state at any turn. A plan with a
        menu needs an array environment.
        """
        if self.menu is not None and not isinstance(env, ArrayEnv):
            raise ConfigError(f"plan {self.name}: expected an array environment, got environment {env.name!r}")
        if self.choose is not None and self.turns != env.max_turns:
            raise ConfigError(
                f"plan.expansions: expected {env.max_turns}, the number of turns of environment {env.name!r}, got "
                f"{self.turns}: {self.name}"
            )
        if self.choose is not None and isinstance(env, ArrayEnv) and len({frozenset(a) for a in env.actors}) > 1:
            raise ConfigError(
                f"plan {self.name}: expected the same roles at every turn of environment {env.name!r}, got actors "
                f"{env.actors}"
            )
        if self.turns not in (None, env.max_turns):
            raise ConfigError(
                f"plan.group: expected one width for each of the {env.max_turns} turns of environment {env.name!r}, "
                f"got {self.turns}: {self.name}"
            )
        if self.local and env.verify is None:
            raise ConfigError(
                f"plan {self.name}: environment {env.name!r} has no local verifier; expected continuation='continue'"
            )
        readers = {"rank": self.rank, "stop_above": self.stop_above is not None, "choose": self.choose is not None}
        why = next((name for name, reads in readers.items() if reads), None)
        if why is None:
            return
        if not self.reward:
            raise ConfigError(
                f"plan {self.name}: {why} needs a reward; environment {env.name!r} pays {', '.join(env.components)}"
            )
        unknown = [component for component, _ in self.reward if component not in env.components]
        if unknown:
            raise ConfigError(
                f"plan {self.name}: {why} reads the reward {unknown[0]!r}; environment {env.name!r} pays "
                f"{', '.join(env.components)}"
            )


ROOT = Branch(0, True)


@functools.cache
def flat(group: int) -> Plan:
    """GRPO: ``group`` whole episodes from each task's first state."""
    return Plan(f"flat({group})", lambda b: group if b.turn == 0 else 1, lambda b, g: Branch(b.turn + 1, True))


@functools.cache
def product(group: int | tuple[int, ...], joint: str = "aligned", *, behind: bool = False) -> Plan:
    """Every state branches: G^k leaves for k turns (G^(W k) when joint actions are crossed).

    MAGRPO's tree (the later library): a group is the samples of one agent at one state. With a width for each turn the
    tree is that of CoRe-Code: ``(P, M)`` are P plans and M programs of each.

    Args:
        group: samples of each seat, G; or G_1 ... G_k, one width for each of an environment's k turns.
        joint: ``aligned`` or ``cross``.
        behind: With widths: an environment may have more turns, which have one sample each.

    Raises:
        ConfigError: there is no width, or a width below 1, or an unknown ``joint``.
    """
    if joint not in JOINT:
        raise ConfigError(f"plan.joint: expected one of {', '.join(JOINT)}, got {joint!r}")
    widths = group if isinstance(group, tuple) else (group,)
    if not widths or min(widths) < 1:
        raise ConfigError(f"plan.group: expected widths >= 1, one or one for each turn, got {group}")
    name = f"product({group})" if joint == "aligned" else f"product({group}, {joint})"
    if behind:
        name, widths = f"{name} and chains", (*widths, 1)
    width = lambda b: widths[min(b.turn, len(widths) - 1)]
    turns = len(widths) if isinstance(group, tuple) and not behind else None
    return Plan(name, width, lambda b, j: Branch(b.turn + 1, True), joint=joint, turns=turns)


@functools.cache
def handoff(group: int, joint: str = "aligned", *, best: bool = True) -> Plan:
    """G samples at each turn, one joint action of which continues: the best, or the first (a random one).

    The first version of MAGRPO, with immediate rewards (discount 0).

    Args:
        group: samples of each seat, G.
        joint: ``aligned`` or ``cross``.
        best: whether the joint action of largest team reward continues.
    """
    if joint not in JOINT:
        raise ConfigError(f"plan.joint: expected one of {', '.join(JOINT)}, got {joint!r}")
    follow = lambda b, j: Branch(b.turn + 1, True) if j == 0 else None
    return Plan(
        f"handoff({group}, {joint}, {'best' if best else 'first'})", lambda b: group, follow, False, joint, best
    )


@functools.cache
def node_wise(group: int | tuple[int, ...], continuation: str = "continue") -> Plan:
    """Node-wise Monte Carlo of JoyAgents-R1: G_1 + ... + G_k samples on a trajectory of k nodes.

    The first sample of a node carries the base trajectory on; it is one of the node's G exchangeable samples. With
    ``continuation="continue"`` the alternatives are played to the end by the current policies (one sample a node, not
    trained on: singleton groups). With ``"local"`` they stop and the environment's verifier scores them. ``group`` may
    be a tuple, one size a turn; its last entry holds for later turns.
    """
    if continuation not in ("continue", "local"):
        raise ConfigError(f"plan.continuation: expected 'continue' or 'local', got {continuation!r}")
    sizes = group if isinstance(group, tuple) else (group,)
    local = continuation == "local"

    def follow(b: Branch, g: int) -> Branch | None:
        if b.trunk and g == 0:
            return Branch(b.turn + 1, True)
        return None if local else Branch(b.turn + 1, False)

    width = lambda b: sizes[min(b.turn, len(sizes) - 1)] if b.trunk else 1
    return Plan(f"node_wise({group}, {continuation})", width, follow, local)


@functools.cache
def grow(expansions: int, choose: Choose, reward: tuple[tuple[str, float], ...] = ()) -> Plan:
    """A tree that grows: each of k expansions goes on from a state that ``choose`` names (MARS^2, arXiv 2604.14564).

    An expansion is one turn of the environment, with one sample of each seat. It begins at the root, or behind an
    earlier expansion. ``choose(key, parents, players, rewards, n) -> (parent, player)`` is a pure function in JAX, and
    runs once for each task before each expansion:

    - ``key``: a typed PRNG key, its own for each task and expansion.
    - ``parents`` int32 [k]: the expansion that each expansion went on from, -1 for the root, -2 from n on.
    - ``players`` int32 [k]: the position in `Team.players` of each expansion's model, -1 from n on.
    - ``rewards`` float32 [k]: the team reward of each expansion. NaN where it is not known, and from n on.
    - ``n`` int32 []: the number of expansions made so far.
    - ``parent``: the expansion to go on from, from 0 to n - 1, or -1 for the root.
    - ``player``: the position in `Team.players` of the model that acts, for every role that acts.

    Behind an expansion that ended the episode nothing can be played. Where ``choose`` names such an expansion, the next
    one begins at the state before it: the two become siblings. So every task has k expansions. Row ``turn`` of the
    tables is the number of the expansion, and ``parent`` is the transition that was gone on from. The j-th expansion of
    a state has the keys of the j-th sample of a static plan. So `choices.root` samples the first turn of ``flat(k)``,
    and `choices.last` the episode of ``flat(1)``. `rollout.choices` has functions to choose by.

    Args:
        expansions: k, equal to the number of turns of the environment.
        choose: the function above; hashable.
        reward: (component, weight) pairs of the team reward that ``choose`` reads.

    Raises:
        ConfigError: ``expansions`` is below 1, or ``choose`` is no function of five arguments.
    """
    if expansions < 1:
        raise ConfigError(f"plan.expansions: expected >= 1, got {expansions}")
    try:
        inspect.signature(choose).bind(*range(5))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "plan.choose: expected a function (key, parents, players, rewards, n) -> (parent, player), got "
            f"{choose!r}: {error}"
        ) from None
    name = getattr(choose, "__name__", type(choose).__name__)
    follow = lambda b, j: Branch(b.turn + 1, True)
    return Plan(f"grow({expansions}, {name})", lambda b: 1, follow, reward=reward, turns=expansions, choose=choose)


@functools.cache
def menu(choices: tuple[str, ...], turn: int = 0) -> Plan:
    """Every choice of a menu at one turn, each played to the end; one sample of each seat at other turns.

    Nobody samples the choices. The siblings of a node are the choices in their order, one each. The policy scores them
    as it scores what it samples: under ``config.sampling``. Their ``source`` is ``MENU``. Where ``max_new_tokens``
    has room, a choice ends with a stop id.

    Args:
        choices: Texts, at least two, and all different.
        turn: Number of the turn, from 0.

    Raises:
        ConfigError: There are fewer than two choices, or an empty one, or two equal ones. Or ``turn`` is below 0.
    """
    if len(choices) < 2 or not all(choices):
        raise ConfigError(f"plan.menu: expected at least two choices, none of them empty, got {choices!r}")
    twice = next((choice for choice in choices if choices.count(choice) > 1), None)
    if twice is not None:
        raise ConfigError(f"plan.menu: expected choices that differ, got {twice!r} twice")
    if turn < 0:
        raise ConfigError(f"plan.turn: expected >= 0, got {turn}")
    of = lambda b: choices if b.turn == turn else ()
    width = lambda b: len(of(b)) or 1
    return Plan(f"menu({','.join(choices)})", width, lambda b, j: Branch(b.turn + 1, True), menu=of)


def single() -> Plan:
    """One episode a task, for evaluation."""
    return flat(1)._replace(name="single")
