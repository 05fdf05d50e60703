"""Meshes for n chips: each part of a chip's memory by arithmetic of its own, sets of chips, and what is refused."""

import dataclasses

import pytest

from experiments.tpu import compile_ahead, plan_pod
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.costs import meshes
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.chips import CHIPS, ChipSet, chip_set
from jaxmarl_llm.costs.workload import update_selection
from jaxmarl_llm.errors import ConfigError

LAYERS, HIDDEN, UNITS, HEADS, KV, HEAD, VOCABULARY = 36, 2048, 11008, 16, 2, 128, 151936  # Qwen2.5-3B
NUMBERS = 3_085_938_688


@pytest.fixture(scope="module")
def joy():
    """JoyAgents-R1 with five models of Qwen2.5-3B: 64 tasks of 8 samples, prompts of 2048 and completions of 512."""
    bare, plan, work, _ = plan_pod.prepare(config_flags.load("experiments/configs/joyagents_r1.py:qwen2_5_3b"))
    return bare, plan, work


def found(joy, mesh, chip=CHIPS["v5p"], **changes):
    """The proposal of ``mesh`` for one row and remat. changes: of the optimizer."""
    cfg, plan, work = joy
    cfg = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, **changes))
    given = meshes.proposals(cfg, plan, work, chip, 16, rows=(1,), remats=(True,), layouts=False)
    return next(p for p in given if p.mesh == mesh)


@pytest.mark.parametrize("kernels", [True, False])
def test_the_parts_of_a_chip_are_counted_apart(joy, kernels):
    """Where attention takes kernels, no scores are in memory."""
    held = found(joy, (2, 4, 2), CHIPS["v5p"]._replace(kernels=kernels)).memory
    scored = 0 if kernels else 4 * HEADS  # bytes of a pair of tokens
    cut = 4 * 2  # fsdp and tensor cut what a model owns, data repeats it
    assert held.parameters == 5 * 2 * NUMBERS / cut
    assert held.optimizer == 5 * 4 * 3 * NUMBERS / cut  # two moments and master copies in float32
    assert held.gradient == 4 * 2 * NUMBERS / cut
    assert held.rollout_copy == 2 * NUMBERS / 2  # of one model at a time, whole along fsdp
    top = meshes.largest_launch(*joy[1:])
    parts = [(-(-part.rows // 8), part.group) for part in top.parts]  # prompts of a chip: 8 chips hold rows
    assert [group for _, group in parts] == [1, 8]  # a node of the trunk, and the alternatives of another
    slots = sum(prompts * (2048 + group * 511) for prompts, group in parts)
    assert held.cache == slots * 2 * LAYERS * KV * HEAD * 2 / 2
    # Scores of a prefill in float32, and activations of a layer in bfloat16; they pass the logits.
    prefill = sum(prompts for prompts, _ in parts) * (scored * 2048**2 + 2 * 2048 * (6 * HIDDEN + 3 * UNITS)) / 2
    samples = sum(prompts * group for prompts, group in parts)
    assert held.generation == max(prefill, 3 * 4 * samples * VOCABULARY / 2)
    tokens = 2048 + 8 * 512
    layers = 2 * tokens * (LAYERS * HIDDEN + 6 * HIDDEN + 3 * UNITS)
    pairs = 2048**2 + 8 * 512 * (2048 + 512)
    assert held.activations == layers + 3 * scored * pairs / 2
    assert held.updating == held.parameters + held.optimizer + held.gradient + held.activations
    assert held.generating == held.parameters + held.optimizer + held.rollout_copy + held.cache + held.generation
    assert held.peak == max(held.generating, held.updating)


def test_an_offloaded_state_is_that_of_one_model_and_not_there_in_generation(joy):
    here, away = found(joy, (2, 4, 2)).memory, found(joy, (2, 4, 2), offload=True).memory
    assert away.optimizer == here.optimizer / 5
    assert here.generating - away.generating == here.optimizer
    assert here.updating - away.updating == here.optimizer - away.optimizer


def test_weights_that_are_not_cut_along_fsdp_have_no_copy(joy):
    assert found(joy, (8, 1, 2)).memory.rollout_copy == 0
    assert found(joy, (1, 8, 2)).memory.parameters == found(joy, (8, 1, 2)).memory.parameters / 8


def test_context_cuts_what_is_saved_and_what_fsdp_cuts_and_sends_keys_and_values(joy):
    """Of one row on four devices; in generation each of the four has the cache of its rows."""
    cfg, *rest = joy
    long = (dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context=4)), *rest)
    one = found(long, (1, 2, 2, 4))
    assert one.settings == {"data": 1, "fsdp": 2, "tensor": 2, "context": 4}
    assert one.memory.parameters == 5 * 2 * NUMBERS / 16 and one.memory.gradient == 4 * 2 * NUMBERS / 16
    tokens, of_token = 2048 + 8 * 512, 2 * KV * HEAD * 2  # bytes of keys and values
    layers = 2 * tokens * (LAYERS * HIDDEN + 6 * HIDDEN + 3 * UNITS)
    assert one.memory.activations == layers / 4 + 2 * tokens * of_token / 2
    top = meshes.largest_launch(*rest)
    slots = sum(-(-part.rows // 2) * (2048 + part.group * 511) for part in top.parts)
    assert one.memory.cache == slots * LAYERS * of_token / 2
    assert meshes.context_bytes(rest[1].models[0].config, tokens, 4, True) == 3 * LAYERS * tokens * of_token * 3 / 4
    assert meshes.context_bytes(rest[1].models[0].config, tokens, 1, True) == 0
    with pytest.raises(ConfigError, match=r"config\.mesh\.context: expected a divisor of 16 chips .* 2048, got 3"):
        found((dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context=3)), *rest), (1, 1, 1))


@pytest.mark.parametrize("chips", [1, 8, 256])
def test_no_estimate_is_below_the_lower_bound(joy, chips):
    """The bound of one chip, shared evenly. On one chip it is 222 s, of which decoding FLOPs are the largest part."""
    cfg, plan, work = joy
    groups, most = update_selection(cfg, work)
    for chip in (CHIPS["h100"], CHIPS["v5e"]):
        update = costs.update_size(plan, work, groups=groups, most=most, remat=True)
        least = sum(costs.roofline(chip, plan, work, update)) / chips
        assert all(p.seconds >= least for p in meshes.proposals(cfg, plan, work, chip, chips, remats=(True,)))


def test_a_second_epoch_takes_as_long_as_the_first(joy):
    cfg, plan, work = joy
    times = []
    for epochs in (1, 2, 3):
        more = dataclasses.replace(cfg, loss=dataclasses.replace(cfg.loss, epochs=epochs))
        given = meshes.proposals(more, plan, work, CHIPS["v5p"], 64, rows=(1,), remats=(True,))
        times.append({p.mesh: p.seconds for p in given})
    groups, most = update_selection(cfg, work)
    least = costs.update_size(plan, work, groups=groups, most=most, remat=True).flops / CHIPS["v5p"].flops / 64
    for mesh, once in times[0].items():
        assert times[1][mesh] - once == pytest.approx(times[2][mesh] - times[1][mesh]) and times[1][mesh] - once > least


@pytest.mark.parametrize("chips", [1, 2, 6, 8, 256])
def test_a_mesh_takes_all_chips_and_cuts_heads_evenly(joy, chips):
    given = meshes.proposals(*joy, CHIPS["v5e"], chips)
    for p in given:
        data, fsdp, tensor = p.mesh
        assert data * fsdp * tensor == chips and KV % tensor == 0 and HIDDEN % fsdp == 0
    assert [p.fits for p in given] == sorted((p.fits for p in given), reverse=True)
    fast = [p.seconds for p in given if p.fits]
    assert fast == sorted(fast)


def test_the_mesh_of_a_configuration_keeps_its_micro_batch(joy):
    cfg, plan, work = joy
    own = meshes.mesh_sizes(cfg, plan, work, CHIPS["v5p"], 32)
    assert own.fits and own.remat and own.micro_tokens == 2048 + 8 * 512  # 8192 tokens hold one node
    twice = dataclasses.replace(cfg, micro_tokens=2 * own.micro_tokens)
    assert meshes.mesh_sizes(twice, plan, work, CHIPS["v5p"], 32).micro_tokens == 2 * own.micro_tokens


def test_layouts_of_generation_are_proposed_where_they_take_less_time(joy):
    """Blocks only where models are alike and separate, and parts that divide the query heads."""
    cfg, plan, work = joy
    found = {p.mesh: p for p in meshes.proposals(cfg, plan, work, CHIPS["v5e"], 256, remats=(True,), rows=(1,))}
    alone = meshes.proposals(cfg, plan, work, CHIPS["v5e"], 256, remats=(True,), rows=(1,), layouts=False)
    for p in alone:
        blocks, wide = found[p.mesh].layout
        assert p.layout == (1, p.mesh[2]) and 256 % (blocks * wide) == 0 and HEADS % wide == 0
        assert (found[p.mesh].fits, -found[p.mesh].seconds) >= (p.fits, -p.seconds)
    best = found[4, 32, 2]
    assert best.layout[0] > 1 and best.layout[1] > KV
    # Each of five models reads its weights for 4,096 tokens a step, not all of them one after the other for 20,480.
    assert best.seconds < 0.25 * next(p.seconds for p in alone if p.mesh == (4, 32, 2))
    assert f"--config.mesh.rollout_blocks={best.layout[0]}" in best.flags
    mixed = work._replace(models=(work.models[0]._replace(rank=8), *work.models[1:]))
    assert all(p.layout[0] == 1 for p in meshes.proposals(cfg, plan, mixed, CHIPS["v5e"], 256, remats=(True,)))


def test_a_micro_batch_is_no_larger_than_the_nodes_there_are(joy):
    """Five nodes of 64 tasks are 64 of each of five models: on 64 devices one each, whatever ``micro_tokens`` allow."""
    cfg, plan, work = joy
    assert meshes.trained_nodes(cfg, plan, work) == 5 * 64
    given = meshes.proposals(cfg, plan, work, CHIPS["v5p"], 64, rows=(32,), remats=(True,))
    tokens = {p.mesh[0] * p.mesh[1]: p.micro_tokens // (2048 + 8 * 512) for p in given}
    assert tokens == {64: 1, 32: 2}  # nodes of a device, by the number of devices that hold rows


def test_what_does_not_fit_fits_with_other_settings(joy):
    cfg, plan, work = joy
    kept = dataclasses.replace(cfg, team=dataclasses.replace(cfg.team, remat=False))
    best, changes = meshes.fitting(kept, plan, work, CHIPS["v5e"]._replace(kernels=False), 256)
    assert best.fits and set(changes) == {"micro_tokens", "team.remat"}
    assert best.remat and meshes.fitting(cfg, plan, work, CHIPS["v5e"], 256)[1] == {}
    # 5 models of 3.1B: 14 bytes a parameter and the gradient of one of them take 240 GB.
    best, changes = meshes.fitting(cfg, plan, work._replace(tasks=1), CHIPS["h100"], 2)
    assert best.fits and changes == {"optimizer.offload": True}
    best, changes = meshes.fitting(kept, plan, work._replace(tasks=1), CHIPS["h100"], 2)
    assert best.fits and set(changes) == {"optimizer.offload", "micro_tokens", "team.remat"}
    assert not meshes.fitting(cfg, plan, work, CHIPS["v5e"], 1)[0].fits


def test_sets_of_chips_are_read():
    assert chip_set("h100") == ChipSet("h100", 1) and chip_set("v5e:256") == ChipSet("v5e", 256)
    assert str(chip_set("v5e:256")) == "v5e:256" and chip_set("tpu7x:8").chip is CHIPS["tpu7x"]
    assert CHIPS["tpu7x"].flops == 1153.5e12  # one of the two devices of a chip
    for text in ("h100:", "h100:0", "h100:-8", "h100:x", "h100:8:2", "h100:9999999999", "h100:٣"):
        with pytest.raises(ConfigError, match=r"^--chip: h100: expected a number of chips from 1 to 1048576, got '"):
            chip_set(text)
    with pytest.raises(ConfigError, match=r"^--chip: unknown chip 'v5x'; did you mean"):
        chip_set("v5x:8")
    assert set(CHIPS) >= {t.partition(":")[0] for t in compile_ahead.TOPOLOGIES}
