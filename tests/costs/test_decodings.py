"""What a rollout decodes one after another, with and without blocks of devices."""

import pytest

from experiments.tpu import plan_pod
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.costs.counts import counts, launches
from jaxmarl_llm.costs.decodings import decodings


@pytest.fixture(scope="module")
def joy():
    """JoyAgents-R1: five models, 64 tasks, one role acts in each of eight turns, at random."""
    _, plan, work, _ = plan_pod.prepare(config_flags.load("experiments/configs/joyagents_r1.py:qwen2_5_3b"))
    return plan, work


def test_without_blocks_every_launch_is_decoded_by_itself(joy):
    found = decodings(*joy, 1)
    started = launches(*joy)
    assert len(found) == len(started) == 5 * 8
    assert [x.lanes for x in found] == [sum(n for n, _ in launch.samples) for launch in started]
    assert [x.nodes for x in found] == [sum(member.nodes for _, member in launch.members) for launch in started]
    assert sum(x.tokens for x in found) == counts(*joy).decode_steps == 5 * 8 * 512


@pytest.mark.parametrize("blocks,in_a_turn,busiest", [(5, 1, 1.0), (8, 1, 1.0), (10, 1, 0.5), (3, 2, 1.0)])
def test_with_blocks_a_turn_takes_as_long_as_its_busiest_block(joy, blocks, in_a_turn, busiest):
    """In the first turn each model has 64 / 5 nodes of 8 samples. ``busiest``: their part on the busiest block."""
    found = decodings(*joy, blocks)
    assert len(found) == in_a_turn * 8 and {x.tokens for x in found} == {512}
    assert found[0].lanes == pytest.approx(blocks * busiest * 64 / 5 * 8)
    assert found[0].nodes == pytest.approx(blocks * busiest * 64 / 5)
