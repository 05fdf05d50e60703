"""Sampling plans: where a rollout branches and how often.

A plan is two pure functions of a place in the tree. It knows nothing of models or environments, and the engines know no
plan by name. What it decides is static (independent of what is sampled), so that array rollouts compile and the number
of samples can be told before anything runs.

Samples of a trajectory of k turns with G per branching node:

    flat       G branches from the root                      G k            (groups at the root only)
    node_wise  G at each node of one base trajectory         k G            (+ continuations when they are played on)
    product    G at every node                               G + ... + G^k  (the naive joint search: G^k leaves)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxmarl_llm.text import ConfigError


class Branch(NamedTuple):
    """The kind of a place in the tree: its turn, and whether the plan branches there as on a base trajectory."""

    turn: int
    trunk: bool


class Plan(NamedTuple):
    """width(branch) -> joint actions sampled there. follow(branch, g) -> where the g-th leads, None: not played on.

    ``local``: every transition is scored by the environment's local verifier instead of by playing on.
    """

    name: str
    width: Callable[[Branch], int]
    follow: Callable[[Branch, int], Branch | None]
    local: bool = False


ROOT = Branch(0, True)


def flat(group: int) -> Plan:
    """GRPO: ``group`` whole episodes from each task's first state."""
    return Plan(f"flat({group})", lambda b: group if b.turn == 0 else 1, lambda b, g: Branch(b.turn + 1, True))


def product(group: int) -> Plan:
    """Every state branches: G^k leaves for k turns."""
    return Plan(f"product({group})", lambda b: group, lambda b, g: Branch(b.turn + 1, True))


def node_wise(group: int | tuple[int, ...], continuation: str = "continue") -> Plan:
    """Node-wise Monte Carlo of JoyAgents-R1: G_1 + ... + G_k samples on a trajectory of k nodes.

    The first sample of a node carries the base trajectory on; it is one of the node's G exchangeable samples. With
    ``continuation="continue"`` the alternatives are played to the end by the current policies (one sample a node, not
    trained on: singleton groups); with ``"local"`` they stop and the environment's verifier scores them. ``group`` may
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


def single() -> Plan:
    """One episode a task, for evaluation."""
    return flat(1)._replace(name="single")
