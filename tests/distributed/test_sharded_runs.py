"""A run on a mesh is the run on one device: gradients, whole steps of two recipes, generation, checkpoints."""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.cli import evaluate
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.recipes import iac, joyagents_r1, maac, magrpo
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.launches import RolloutWeights
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs import loop, phases
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.learner import Batch, make_learner, pad_rows, update
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.packing import pack
from tests import toys

MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2)}
BACKBONE = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 8, "num_kv_heads": 8}
SMALL: dict[str, Any] = {
    "steps": 3,
    "batch": 8,
    "group": 2,
    "sft": {"steps": 0},
    "run": {"eval_every": 0, "eval_greedy": False, "log_every": 100, "tensorboard": False},
}


def config(recipe, name, critic=None, **more):
    """MAGRPO, IAC, MAAC: two separate Qwen2, SGD. JoyAgents-R1: one Qwen3 for all roles, Adam, memory.

    A step of SGD changes parameters by their gradient, because its rate is 1.
    Qwen3 has no biases. The gradient of a key's bias is 0 but for rounding, of which Adam makes a whole step.
    """
    team = {"max_new_tokens": 7, "remat": False, "backbone": {**BACKBONE, "head_dim": 8}}
    if recipe is not joyagents_r1:
        own = {
            "env": {"name": "matrix", "eval_tasks": 8},
            "reward": {"payoff": 1.0},
            "team": {**team, "max_new_tokens": 1},
        }
        own["optimizer"] = {"name": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        if critic is not None:
            own["team"]["critic"], own["critic_optimizer"] = critic, own["optimizer"]
    else:
        backbone = {**team["backbone"], "family": "qwen3"}
        own = {"env": {"name": "dispatch", "eval_tasks": 8}, "memory": {"capacity": 8, "retrieve": 1, "warmup": 4}}
        own |= {
            "team": {**team, "parameter_sharing": "shared", "backbone": backbone},
            "optimizer": {"learning_rate": 4e-4},
        }
    mesh = {} if name is None else {"mesh": dict(zip(sharding.AXES, MESHES[name]))}
    return from_dict(recipe.Config, {**SMALL, **own, **mesh, **more})


def by_path(tree):
    return {"/".join(sharding.names_of(p)): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def distance(got, expected):
    got, expected = by_path(got), by_path(expected)
    assert got.keys() == expected.keys()
    return max((float(np.abs(np.asarray(got[k]) - np.asarray(v)).max()) for k, v in expected.items()), default=0.0)


def parameters_apart(got, one):
    """Distance after a step. Adam makes a whole step of any gradient, also of one that is rounding: where its first
    moment is below 1e-5 of the largest, which is in few places, parameters may be two steps apart.
    """
    moments = {k.split("/mu/")[1]: np.abs(v) for k, v in by_path(one.opt_state).items() if "/mu/" in k}
    if not moments:
        return distance(got.params, one.params)
    floor, far = 1e-5 * max(m.max() for m in moments.values()), 0.0
    expected = by_path(one.params)
    for key, value in by_path(got.params).items():
        apart, moment = np.abs(np.asarray(value) - np.asarray(expected[key])), moments[key.removeprefix("agents/team/")]
        rounding = (moment > 0) & (moment < floor)
        assert rounding.mean() < 0.01 and (apart[rounding] <= 2 * 4e-4).all(), key
        far = max(far, float(apart[~rounding].max()))
    return far


class Stepped(NamedTuple):
    recipe: phases.Recipe
    tree: Any  # sampled in the first step
    before: Any  # parameters on the host
    state: Any  # after the first step
    metrics: dict


def step(recipe, state, folder, number):
    with Logger(folder, resume_step=None, total_steps=3, interval=100) as logger:
        return recipe.step(state.replace(step=jnp.int32(number)), logger)


@functools.cache
def stepped(recipe, name, folder):
    return step_of(recipe.make(config(recipe, name)), folder / f"{recipe.__name__}-{name}", pay=toys.paid)


def step_of(made, folder, pay=lambda tree: tree):
    """The first step of a recipe. ``pay``: changes the tree of the rollout."""
    trees, original = [], made.env_runner.play

    def spy(*args, **kwargs):
        played = original(*args, **kwargs)
        trees.append(played.tree)
        return played._replace(tree=pay(played.tree))

    made.env_runner.play = spy
    start = made.init(0)
    before = jax.device_get(start.params)
    state, metrics = step(made, start, folder, 0)
    made.env_runner.close()
    return Stepped(made, trees[0], before, state.replace(step=jnp.int32(1)), metrics)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "recipe,name",
    [
        *((magrpo, name) for name in MESHES),
        (joyagents_r1, "8x1x1"),
        (joyagents_r1, "2x2x2"),
        pytest.param(joyagents_r1, "1x8x1", marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2],
)
def test_a_step_is_that_of_one_device(recipe, name, folder):
    """Equal tokens; log-probs, metrics and new parameters within 1e-5 (float32). Gradients of SGD within 1e-6."""
    one, got = stepped(recipe, None, folder), stepped(recipe, name, folder)
    assert distance(got.before, one.before) < 1e-6
    np.testing.assert_array_equal(got.tree.steps.tokens, one.tree.steps.tokens)
    np.testing.assert_allclose(got.tree.steps.logprobs, one.tree.steps.logprobs, rtol=0, atol=1e-5)
    assert distance(one.state.params, one.before) > 3e-4  # or there is nothing to compare
    assert parameters_apart(got.state, one.state) < (1e-6 if recipe is magrpo else 1e-5)
    assert distance(got.state.opt_state, one.state.opt_state) < 1e-5
    assert got.metrics.keys() == one.metrics.keys()
    for key, value in one.metrics.items():
        if not key.startswith(("time/", "speed/")):
            assert got.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    print(
        f"{recipe.__name__} {name}: parameters {parameters_apart(got.state, one.state):.1e}, log-probs "
        f"{np.abs(got.tree.steps.logprobs - one.tree.steps.logprobs).max():.1e}"
    )


@pytest.mark.parametrize("name", ["2x2x2", pytest.param("8x1x1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe,kind", [(iac, "separate"), (maac, "joint")], ids=["iac", "maac"])
def test_critics_of_their_own_step_as_on_one_device(recipe, kind, name, folder):
    """Players and their critics, which are models of their own and read the prompts of one role or of all."""
    one, got = (
        step_of(recipe.make(config(recipe, mesh, critic=kind)), folder / f"{kind}-{mesh}", pay=toys.paid)
        for mesh in (None, name)
    )
    np.testing.assert_array_equal(got.tree.steps.tokens, one.tree.steps.tokens)
    critics = set(one.recipe.team.critics)
    players = {role.model for role in one.recipe.team.roles}
    assert not critics & players and critics | players == set(one.state.params["agents"])
    for group in [critics, players]:
        own = lambda params, group=group: {name: params["agents"][name] for name in group}
        assert distance(own(one.state.params), own(one.before)) > 3e-4
        assert distance(own(got.state.params), own(one.state.params)) < 1e-6
    losses = [name for name in one.metrics if name.startswith("critic/")]
    assert losses
    for key in losses:
        np.testing.assert_allclose(got.metrics[key], one.metrics[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["8x1x1", "2x2x2", pytest.param("1x8x1", marks=pytest.mark.slow)])
def test_a_state_is_cut(name, folder):
    """Parameters and Adam's moments after a step: each device has its share; memory and counters are whole."""
    state, (_, fsdp, tensor) = stepped(joyagents_r1, name, folder).state, MESHES[name]
    cut = {k: v for part in (state.params, state.opt_state) for k, v in by_path(part).items() if k.endswith("kernel")}
    assert len(cut) == 3 * 7  # parameters, mu, nu
    for key, leaf in cut.items():
        into = (tensor, fsdp) if "o_proj" in key or "down_proj" in key else (fsdp, tensor)
        shape = leaf.addressable_shards[0].data.shape
        assert shape == (1, leaf.shape[1] // into[0], leaf.shape[2] // into[1]), key
    for leaf in jax.tree.leaves((state.memory, state.counters, state.key)):
        assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == 8


def test_one_device_is_what_it_was(folder):
    """The default configuration on a machine of eight: arrays on one device, programs for one."""
    state = stepped(magrpo, None, folder).state
    assert {d for leaf in jax.tree.leaves(state) for d in leaf.devices()} == {jax.devices()[0]}
    policy = make_policy(arch())
    learner = make_learner(policy, Loss(), Optimizer(), Sampling())
    text = learner.accumulate.lower(variables(policy), None, batch(8), None).as_text()
    assert "sharding" not in text.lower() and "mhlo.num_partitions = 1" in text


# Gradients


def arch(**extra):
    fields = {"family": "qwen3", "attention_bias": False, "qk_norm": True, "tie_embeddings": False, **extra}
    return Config(264, 64, 128, 1, 8, 8, 8, **fields)


def variables(policy):
    return {"params": policy.init(jax.random.key(1))}


def batch(n, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(0, 264, shape).astype(np.int32)
    value = lambda: rng.normal(size=(n, 2, 5)).astype(np.float32)
    weights = (rng.random((n, 2, 5)) < 0.8).astype(np.float32) / (8 * n)
    return Batch(draw(n, 6), rng.integers(1, 7, n).astype(np.int32), draw(n, 2, 5), weights, value(), -5 + value())


LOSS, RULE = Loss(clip_low=None), Optimizer(name="sgd", learning_rate=1.0, max_grad_norm=0.0)


def gradient(own, shared, mesh, n=6):
    """Loss, gradient and compiled text of a batch, padded to the rows of ``mesh``."""
    learner = make_learner(make_policy(arch()), LOSS, RULE, Sampling())
    with meshes.use_mesh(mesh):
        rows = sharding.put_rows(pad_rows(batch(n), sharding.row_parts()))
        program = learner.accumulate.lower(own, shared, rows, None).compile()
        grad, metrics, scored = program(own, shared, rows, None)
        return float(metrics["loss"]), float(scored.gap), grad, program.as_text()


@functools.cache
def reference_gradient():
    return gradient(variables(make_policy(arch())), None, None)


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradient_are_those_of_one_device(name):
    """Six rows, padded to eight on the mesh; the collectives are those of the layout."""
    loss, gap, grad, _ = reference_gradient()
    mesh = make_mesh(MeshConfig(*MESHES[name]))
    got_loss, got_gap, got, text = gradient(sharding.place(mesh, variables(make_policy(arch()))), None, mesh)
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(grad))
    assert scale > 1e-2
    assert abs(got_loss - loss) < 1e-5 and abs(got_gap - gap) < 1e-5 and distance(got, grad) < 1e-6
    print(f"{name}: loss {abs(got_loss - loss):.1e}, gradient {distance(got, grad):.1e} of at most {scale:.1e}")
    for path, want in by_path(sharding.shardings(mesh, grad)).items():
        assert by_path(got)[path].sharding.is_equivalent_to(want, by_path(grad)[path].ndim), path
    _, fsdp, tensor = MESHES[name]
    assert re.search(r"all-reduce|reduce-scatter", text)
    kernel = rf"f32\[64,{64 // tensor}\]\S* all-gather\("  # of q_proj: whole along fsdp, cut along tensor
    assert bool(re.search(kernel, text)) == (fsdp > 1)
    assert bool(re.search(r"all-gather", text)) == (fsdp > 1)
    assert "num_partitions=8" in text


def test_adapter_gradient_on_a_mesh():
    """A LoRA over a frozen backbone, both cut three ways."""
    policy = make_policy(arch())
    shared = variables(policy)["params"]
    lora = init_lora(jax.random.key(2), shared, 4)
    own = {"lora": jax.tree.map(lambda x: x + 0.05, lora)}  # B is not 0
    mesh = make_mesh(MeshConfig(*MESHES["2x2x2"]))
    loss, _, grad, _ = gradient(own, shared, None)
    got_loss, _, got, _ = gradient(sharding.place(mesh, own), sharding.place(mesh, shared), mesh)
    assert abs(got_loss - loss) < 1e-5 and distance(got, grad) < 1e-6
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(grad)) > 1e-2
    shard = {k: v.addressable_shards[0].data.shape for k, v in by_path(got).items()}
    assert shard["lora/self_attn/q_proj/a"] == (1, 32, 4) and shard["lora/self_attn/q_proj/b"] == (1, 4, 32)
    assert shard["lora/mlp/down_proj/a"] == (1, 64, 4) and shard["lora/mlp/down_proj/b"] == (1, 4, 32)


# Layouts


def test_the_rollout_layout_moves_what_fsdp_cut_and_nothing_else():
    mesh = make_mesh(MeshConfig(*MESHES["2x2x2"]))
    params = sharding.place(mesh, variables(make_policy(arch())))
    out = sharding.to_rollout(mesh, params)
    assert distance(out, params) == 0
    before, after = by_path(params), by_path(out)
    for key, leaf in after.items():
        if "fsdp" in before[key].sharding.spec:
            assert leaf.sharding.spec == sharding.without_fsdp(before[key].sharding.spec), key
            assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes // 2  # tensor stays cut
        else:
            assert leaf is before[key]
    assert after["params/embed/embedding"] is not before["params/embed/embedding"]
    flat_mesh = make_mesh(MeshConfig(8))
    placed = sharding.place(flat_mesh, variables(make_policy(arch())))
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (sharding.to_rollout(flat_mesh, placed), placed))))


def test_a_models_copies_go_before_the_next_ones_are_made(monkeypatch):
    made, alive = [], []

    class Copy(dict):
        pass

    def to_rollout(mesh, params):
        alive.append(sum(ref() is not None for ref in made))
        copy = Copy(params)
        made.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(sharding, "to_rollout", to_rollout)
    team = toys.team(("a", "b"))
    playing = RolloutWeights(toys.params(team))
    for model in (0, 0, 1, 0):
        playing.variables(team.models[model])
    assert alive == [0, 0, 0]


def test_a_host_rollout_on_a_mesh_is_that_of_one_device():
    """Three tasks on eight devices: launches are padded to the rows of the mesh, every token is the same."""
    config = matrix.Config(rounds=2)
    team = toys.team(matrix.ROLES, max_new_tokens=2, shared=True)
    params, trees = toys.params(team), []
    for mesh in (None, make_mesh(MeshConfig(8))):
        pool = EnvPool(functools.partial(toys.text_game, config), workers=0)
        placed = params if mesh is None else sharding.place(mesh, params)
        with meshes.use_mesh(mesh):
            settings = HostSettings(flat(2), Sampling(), max_prompt=64)
            got = play(team, placed, pool, [0, 1, 2], jax.random.key(5), settings)
        trees.append(got.tree)
    one, many = trees
    np.testing.assert_array_equal(one.steps.tokens, many.steps.tokens)
    np.testing.assert_allclose(one.steps.logprobs, many.steps.logprobs, rtol=0, atol=1e-5)
    assert one.steps.valid.sum() == 3 * 2 * 2 * 2


def test_padding_rows_changes_no_update():
    one, many = batch(3), pad_rows(batch(3), 8)
    assert many.weights.shape == (8, 2, 5) and many.length.min() >= 1 and not many.weights[3:].any()
    assert pad_rows(many, 8) is many
    policy = make_policy(arch())
    learner = make_learner(policy, LOSS, RULE, Sampling())
    after = [update(learner, LOSS, variables(policy), None, learner.init(variables(policy)), [b]) for b in (one, many)]
    assert distance(after[0].own, after[1].own) < 1e-6 and distance(after[0].own, variables(policy)) > 1e-2
    assert after[0].metrics == pytest.approx(after[1].metrics, abs=1e-6)


# Checkpoints


@pytest.mark.parametrize("name", ["8x1x1", None])
def test_a_checkpoint_goes_on_on_another_mesh(name, folder, tmp_path):
    """Saved on 2x2x2 after a step of JoyAgents-R1, restored elsewhere: the same bytes, then the same next step."""
    saved = stepped(joyagents_r1, "2x2x2", folder)
    cfg = config(joyagents_r1, "2x2x2")
    saver = Checkpointer(tmp_path)
    meta = loop._meta(cfg, 1, loop.fingerprint_of(saved.state.params["shared"]))
    saver.save(1, loop.without_shared(saved.state), meta)
    saver.wait()
    recipe = stepped(joyagents_r1, name, folder).recipe
    loop._check_same(config(joyagents_r1, name), saver.read_meta(), ())  # a mesh may change on the way
    state, at = loop.restore(saver, recipe, saver.read_meta())
    saver.close()
    assert at == 1 and digests(state) == digests(saved.state)
    devices = 1 if name is None else 8
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(state)} == {devices}
    kernel = by_path(state.params)["agents/team/params/layers/self_attn/q_proj/kernel"]
    assert kernel.addressable_shards[0].data.shape == (1, 64, 64)
    expected, expected_metrics = step(saved.recipe, copied(saved.state), tmp_path / "expected", 1)
    got, metrics = step(recipe, state, tmp_path / "got", 1)
    for key, value in expected_metrics.items():
        # The negative log-likelihood is near 5, where float32 counts in steps of 5e-7: 1e-6 of its size.
        close = {"rel": 1e-6, "abs": 1e-6} if key.endswith("nll") else {"rel": 1e-5, "abs": 1e-5}
        if not key.startswith(("time/", "speed/")):
            assert metrics[key] == pytest.approx(value, **close), key
    losses = [abs(metrics[k] - v) for k, v in expected_metrics.items() if k.endswith("nll")]
    assert losses and distance(got.params, expected.params) < 1e-5
    print(f"{name}: losses {max(losses):.1e}, parameters {distance(got.params, expected.params):.1e}")


def copied(state):
    """For a step that donates."""
    return jax.tree.map(lambda x: jax.device_put(jnp.copy(x), x.sharding), state)


# Refusals


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"mesh": {"data": 3}}, r"config\.mesh: 8 devices cannot be data=3 x fsdp=1 x tensor=1"),
        ({"mesh": {"data": 1, "tensor": 16}}, r"config\.mesh: 8 devices cannot be"),
        ({"mesh": {"data": 0}}, r"config\.mesh\.data: expected >= 1"),
    ],
)
def test_meshes_that_do_not_fit_the_devices_end_a_run_before_it_starts(changes, message):
    with pytest.raises(ConfigError, match=message):
        magrpo.make(config(magrpo, None, **changes))


@pytest.mark.parametrize(
    "backbone,mesh,message",
    [
        (
            {"num_heads": 24, "num_kv_heads": 3},
            (1, 1, 8),
            r"config\.mesh\.tensor: 3 key/value heads of \w+ neither divide into 8 parts nor can each be copied",
        ),
        ({"vocab_size": 265}, (1, 1, 8), r"/embed/embedding \(265, 64\): 265 does not .* tensor"),
        ({"hidden_size": 60}, (1, 8, 1), r"/embed/embedding \(264, 60\): 60 does not .* fsdp"),
    ],
)
def test_models_that_do_not_fit_the_mesh_are_named(backbone, mesh, message):
    team = {"backbone": {**BACKBONE, "head_dim": 8, **backbone}}
    with pytest.raises(ConfigError, match=message):
        magrpo.make(config(magrpo, None, team=team, mesh=dict(zip(sharding.AXES, mesh))))


def test_what_takes_no_mesh_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.mesh: a run compiled as a whole has none"):
        make_program(magrpo.make(config(magrpo, "8x1x1")))
    with pytest.raises(ConfigError, match=r"--mesh: expected three numbers as in 1,8,1, got '1,x,1'"):
        evaluate.open_run(tmp_path, mesh=["1", "x", "1"])


def test_micro_batches_are_whole_on_every_device(folder):
    """Nodes of a packed batch are a multiple of the parts, hold what they held, and cost no device more tokens."""
    tree, loss = stepped(magrpo, None, folder).tree, Loss(clip_low=None, aggregation="sum")
    gain = np.random.default_rng(0).normal(size=len(tree.steps.node)).astype(np.float32)
    packed = {parts: pack(tree, 0, gain, tree.steps.valid, loss, micro_tokens=4, parts=parts) for parts in (1, 4, 8)}
    seen = lambda batches: sorted(b.advantages[b.weights > 0].tolist() for b in batches)
    flat_seen = {parts: sorted(x for row in seen(batches) for x in row) for parts, batches in packed.items()}
    assert len(flat_seen[1]) > 8 and flat_seen[1] == flat_seen[4] == flat_seen[8]
    for parts, batches in packed.items():
        for b in batches:
            n, p = b.tokens.shape
            assert n % parts == 0
            assert n // parts * (p + b.completions[0].size) <= 4
    assert len(packed[8]) < len(packed[4]) < len(packed[1])
