"""What a rollout decodes one after another, where several models may be decoded at once on blocks of devices."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from jaxmarl_llm.costs.counts import Workload, launches, longest
from jaxmarl_llm.generation.blocks import blocks_of
from jaxmarl_llm.rollout.plans import Plan


class Decoding(NamedTuple):
    """Launches of one turn that run at once, on one of several blocks: the one with the most samples.

    nodes, lanes: expected prompts and samples, times the number of blocks. tokens: of the longest completion.
    """

    nodes: float
    lanes: float
    tokens: float


def decodings(plan: Plan, work: Workload, blocks: int) -> list[Decoding]:
    """List what a rollout decodes one after another: a launch for each model and turn, or for each turn with blocks.

    Args:
        plan: plan of sampling.
        work: workload.
        blocks: models that are decoded at once.
    """
    found = []
    started = [launch for launch in launches(plan, work) if sum(n for n, _ in launch.samples)]
    at_once = lambda k: started[k].turn if blocks > 1 else k
    for _, numbers in itertools.groupby(range(len(started)), at_once):
        of_turn = [started[k] for k in numbers]
        for first in range(0, len(of_turn), blocks):
            chosen = of_turn[first : first + blocks]
            lanes = [sum(n for n, _ in launch.samples) for launch in chosen]
            nodes = [sum(member.nodes for _, member in launch.members) for launch in chosen]
            shares = blocks_of(lanes, blocks)
            most = lambda amounts, shares=shares: blocks * max(n / k for n, k in zip(amounts, shares, strict=True))
            tokens = longest([sample for launch in chosen for sample in launch.samples])
            found.append(Decoding(most(nodes), most(lanes), tokens))
    return found
