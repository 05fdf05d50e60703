"""A launch of several widths or adapters samples what launches of one sample: token for token, plans and teams."""

import re

import jax
import numpy as np
import pytest

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation.decoding import join, launch_sizes, split
from jaxmarl_llm.generation.generate import PromptRows, generate_launch, sample_launch, use_compaction
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import Action, HostEnv, Message
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.launches import TeamSampler
from jaxmarl_llm.rollout.plans import Branch, Plan, flat, node_wise, product
from jaxmarl_llm.types import Model, Retrieval, Role, Team
from tests import toys
from tests.generation.test_generate import random_params

ROLES = ("a", "b")
TASKS = 2
EOS = toys.TOKENIZER.EOS


class WidthByWidth(TeamSampler):
    """The earlier engine: a launch for each model and number of samples, one after another, through the cache."""

    def sample(self, requests, *, more):
        out, rows_of = [None] * len(requests), {}
        for n, request in enumerate(requests):
            rows_of.setdefault((request.model, request.group), []).append(n)
        for (m, group), rows in sorted(rows_of.items()):
            keep = more or any(model == m and wider > group for model, wider in rows_of)
            samples = self._launch(self._together[m], [[requests[n] for n in rows]], keep)
            for n, found in zip(rows, samples, strict=True):
                out[n] = found
            self.launches += 1
        return out


def policy_of():
    """A random model that ends about a third of its completions before five tokens."""
    base, extra = toys.policy(), np.zeros(264, np.float32)
    extra[EOS] = 3.0
    return base._replace(unembed=lambda variables, hidden: base.unembed(variables, hidden) + extra)


def team_of(how, limits):
    """Two roles: of one model (shared), of models of their own (separate) or of adapters over one base (lora).

    head: one model, whose tokens are drawn from hidden states. invariant: likewise, with generation whose bits depend
    on nothing else.
    """
    names = ROLES if how in ("separate", "lora") else ("m", "m")
    drawn = {"head": toys.policy(), "invariant": invariant(toys.policy())}
    policy = drawn[how] if how in drawn else policy_of()
    base = "base" if how == "lora" else None
    models = tuple(Model(name, policy, toys.TOKENIZER, base) for name in dict.fromkeys(names))
    params = policy.init(jax.random.key(0))
    own = lambda i: {"params": policy.init(jax.random.key(i + 1))}
    if base:
        noise = lambda key, tree: jax.tree.map(lambda x: x + 0.3 * jax.random.normal(key, x.shape, x.dtype), tree)
        own = lambda i: {"lora": noise(jax.random.key(i), init_lora(jax.random.key(i), params, 2 + i))}
    team = Team(tuple(Role(role, name, n) for role, name, n in zip(ROLES, names, limits)), models)
    return team, {
        "shared": {base: params} if base else {},
        "agents": {model.name: own(i) for i, model in enumerate(models)},
    }


def chat(turns, ends=False):
    """All roles act in every turn; a prompt shows its role's name and all tokens so far. ``ends``: by the words."""

    def observe(state):
        task, heard = state
        said = [token for turn in heard for ids in turn for token in ids]
        return {r: (Message("raw", "", (65 + i, 48 + task, *b"prompt>", *said)),) for i, r in enumerate(ROLES)}

    def step(seed, state, actions: dict[str, Action]):
        said = tuple(actions[r].ids for r in ROLES)
        state = state[0], (*state[1], said)
        done = len(state[1]) == turns or (ends and sum(map(sum, said)) % 3 == 0)
        return state, {r: {"accuracy": float(len(a.ids))} for r, a in actions.items()}, done

    verify = lambda state: {r: {"accuracy": float(len(state[1]))} for r in ROLES}
    return HostEnv("chat", ROLES, turns, ("accuracy",), lambda seed, task: (task, ()), observe, step, verify)


def remembered(roles, prompts):
    """Stands for a memory: some prompts begin with an entry, whose length depends on the role."""
    entry = lambda role: Message("raw", "", tuple(b"remember this. "[: 7 * role]))
    n = len(prompts)
    return [(entry(role), *prompt) if role else prompt for role, prompt in zip(roles, prompts)], Retrieval.empty(n)


RAGGED = Plan("ragged", lambda b: (2, 3, 4)[b.turn] if b.trunk else 1, lambda b, j: Branch(b.turn + 1, j < 2))


def both(plan, how, *, turns=2, limits=(5, 5), sampling=Sampling(), ends=False, recall=None):
    """The rollout of this engine and that of the earlier one."""
    team, params = team_of(how, limits)
    out = []
    for sampler in (TeamSampler, WidthByWidth):
        made = lambda team, params, sampling, version, sampler=sampler: sampler(team, params, sampling)
        settings = HostSettings(plan, sampling, max_prompt=256, recall=recall, sampler=made)
        with EnvPool(lambda: chat(turns, ends), workers=0) as pool:
            out.append(play(team, params, pool, list(range(TASKS)), jax.random.key(1), settings).tree)
    return out


CASES = {
    "node-wise": (node_wise(3), "separate", {"turns": 3}),
    "limits": (node_wise(4), "shared", {"limits": (2, 5)}),
    "long": (node_wise(6), "shared", {"limits": (40, 3)}),  # unfinished samples go on alone
    "ends": (RAGGED, "shared", {"ends": True, "turns": 3}),
    "local": (node_wise((2, 3), "local"), "shared", {}),
    "flat": (flat(3), "shared", {}),
    "product": (product(2), "shared", {}),
    "crossed": (product(2, "cross"), "separate", {}),
    "adapters": (node_wise(3), "lora", {"limits": (3, 5)}),
    "adapters, long": (node_wise(6), "lora", {"limits": (70, 3)}),  # unfinished samples go on alone
    "adapters, crossed": (product(2, "cross"), "lora", {}),
    "adapters, memory": (node_wise(3), "lora", {"recall": remembered, "limits": (6, 2)}),
    "memory": (node_wise(3), "shared", {"recall": remembered, "limits": (6, 2)}),
    "colder": (node_wise(2), "shared", {"sampling": Sampling(temperature=0.7, top_k=20)}),
    "from hidden states": (node_wise((2, 3)), "head", {}),
    "invariant": (node_wise(3), "invariant", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_launch_of_a_turn_samples_what_launches_by_width_sample(case):
    plan, how, options = CASES[case]
    one, other = both(plan, how, **options)
    for table in ("nodes", "steps", "transitions"):
        mine, theirs = vars(getattr(one, table)), vars(getattr(other, table))
        for name in mine.keys() - {"logprobs"}:
            jax.tree.map(np.testing.assert_array_equal, mine[name], theirs[name])
    exact = {"atol": 0} if how == "invariant" else {"atol": 1e-5}
    np.testing.assert_allclose(one.steps.logprobs, other.steps.logprobs, rtol=0, **exact)
    nodes, valid = one.nodes, one.nodes.valid
    width = np.bincount(one.steps.node[one.steps.valid])
    by_width = set(zip(nodes.turn[valid], nodes.model[valid], width[: valid.sum()], strict=True))
    assert int(other.counts.launches) == len(by_width)
    own = {(turn, 0 if how == "lora" else model) for turn, model, _ in by_width}
    assert int(one.counts.launches) == len(own)
    mixed = how == "lora" or (plan.name.startswith(("ragged", "node_wise")) and not plan.local)
    assert (int(one.counts.launches) < int(other.counts.launches)) == mixed
    read = one.nodes.length[one.nodes.valid].sum()
    assert int(one.counts.prompt_tokens) < read  # prefixes are reused
    assert (one.steps.truncated[one.steps.valid]).any() and not one.steps.truncated[one.steps.valid].all()


# ---- parts of a launch ----------------------------------------------------------------------------------------------

ENDS = {"stop_ids": (16, 52, 59), "pad_id": 9}


def parts_of(shapes, limited, size=61, seed=0):
    """Random prompts for parts of (N, G), each with rows of different lengths and one row that is inactive."""
    rng, out = np.random.default_rng(seed), []
    for n, g in shapes:
        keys = jax.random.wrap_key_data(rng.integers(0, 2**32, (n, g, 2), dtype=np.uint32))
        active = np.arange(n) != n - 1 if n > 1 else np.ones(n, bool)
        limit = rng.integers(1, limited + 1, n).astype(np.int32) if limited else None
        length = rng.integers(1, 13, n).astype(np.int32)
        out.append(PromptRows(rng.integers(0, size, (n, 12)).astype(np.int32), length, keys, active, limit=limit))
    return out


@pytest.fixture(scope="module")
def model():
    config = Config(61, 32, 48, 2, 4, 2, 8)
    policy = make_policy(config, remat=False)
    return policy, {"params": random_params(policy)}


def assert_alike(got, want):
    for name in ("tokens", "length", "truncated"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("most", [6, 80])
@pytest.mark.parametrize("shapes", [[(3, 1), (2, 8)], [(1, 8), (20, 1), (4, 3)]], ids=str)
def test_parts_sample_what_each_samples_alone(model, shapes, most):
    """Completions and caches. With 80 tokens the unfinished go on alone, at sizes of their own for each part."""
    assert (most > 64) == use_compaction(most)
    fixed = {"max_new_tokens": most, "sampling": Sampling(), "keep": True, **ENDS}
    parts = parts_of(shapes, limited=most)
    together = generate_launch(*model, parts, **fixed)
    for part, (out, prefix, suffix) in zip(parts, together, strict=True):
        ((alone, of_prompts, of_samples),) = generate_launch(*model, [part], **fixed)
        assert_alike(out, alone)
        jax.tree.map(np.testing.assert_array_equal, prefix, of_prompts)
        filled = np.arange(most - 1) < np.asarray(out.length)[..., None] - 1
        for a, b in zip(jax.tree.leaves(suffix), jax.tree.leaves(of_samples), strict=True):
            np.testing.assert_allclose(np.asarray(a)[filled], np.asarray(b)[filled], atol=1e-5)


def test_a_decode_step_reads_the_weights_once_for_all_parts(model):
    """The products of a step do not become more with the parts, but for those of attention."""
    policy, variables = model
    fixed, products = {"max_new_tokens": 4, "sampling": Sampling(), **ENDS}, []
    run = lambda v, parts: sample_launch(policy, v, parts, **fixed)
    for shapes in ([(4, 2)], [(4, 2), (8, 1)], [(4, 2), (8, 1), (4, 3)]):
        (loop,) = [e for e in jax.make_jaxpr(run)(variables, parts_of(shapes, 0)).eqns if e.primitive.name == "while"]
        text = str(loop.params["body_jaxpr"])
        lanes = sum(n * g for n, g in shapes)
        products.append((len(re.findall(r"= dot_general", text)), f"f32[1,{lanes},1,48]" in text))
    counts = [n for n, _ in products]
    assert counts[1] - counts[0] == counts[2] - counts[1] == 2 * 4  # of two layers: scores and values, prompt and own
    assert counts[0] > 2 * 7 and [joined for _, joined in products] == [False, True, True]


def test_sizes_of_a_launch_are_those_of_its_parts():
    assert launch_sizes([(8, 8), (56, 1)]) == [((2, 8), (14, 1)), ((1, 8), (14, 1))]
    assert launch_sizes([(1, 8), (64, 8)]) == [((1, 8), (16, 8)), ((1, 8), (4, 8))]
    assert launch_sizes([(1, 8), (3, 1)]) == []


@pytest.mark.parametrize("shapes,most", [([(8, 1), (16, 3)], 6), ([(128, 1), (16, 8)], 80)])
def test_lanes_of_a_part_stay_on_their_device(model, shapes, most):
    """Rows of each part are split over the mesh. The decoding loop moves no lane, and samples are the same.

    With 80 tokens each device gathers its own unfinished lanes, once these fit on all devices: of 32 lanes, 12.
    """
    (policy, variables), sizes = model, []
    parts, fixed = parts_of(shapes, most), {"max_new_tokens": most, "sampling": Sampling(), "keep": True, **ENDS}
    want = generate_launch(policy, variables, parts, **fixed)

    def decode(variables, tokens, *more):
        lanes = sum(x.size for x in tokens)
        jax.debug.callback(lambda: sizes.append(lanes))
        return policy.decode(variables, tokens, *more)

    mesh = meshes.make_mesh(meshes.MeshConfig(data=8), jax.devices())
    with meshes.use_mesh(mesh):
        noted = policy._replace(decode=decode)
        run = jax.jit(lambda v, parts: sample_launch(noted, v, parts, **fixed, compact=use_compaction(most)))
        given = sharding.put_whole(variables), sharding.put_rows(parts)
        text = run.lower(*given).compile().as_text()
        got = sharding.to_host(run(*given))
    for (one, prefix, suffix), (other, of_prompts, of_samples) in zip(got, want, strict=True):
        assert_alike(one, other)
        filled = np.arange(most - 1) < np.asarray(other.length)[..., None] - 1
        for a, b in zip(jax.tree.leaves(suffix), jax.tree.leaves(of_samples), strict=True):
            np.testing.assert_allclose(np.asarray(a)[filled], np.asarray(b)[filled], atol=1e-5)
        for a, b in zip(jax.tree.leaves(prefix), jax.tree.leaves(of_prompts), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    jax.effects_barrier()
    ends = [np.asarray(out.length).max(1).reshape(8, -1) for out, *_ in want]  # last tokens, by device
    few = lambda t: most > 6 and all(((end >= t).sum(1) <= n).all() for end, n in zip(ends, (4, 1)))
    assert sizes == [8 * 12 if few(t) else sum(n * g for n, g in shapes) for t in range(1, max(map(np.max, ends)))]
    assert len(set(sizes)) == (1 if most == 6 else 2)
    assert not re.findall(r"(?:all-to-all|collective-permute|all-gather)(?:-start)?\(", text)


def test_parts_of_a_mesh_are_joined_and_split_on_their_devices():
    mesh = meshes.make_mesh(meshes.MeshConfig(data=8), jax.devices())
    lanes = [np.arange(n * g).reshape(n, g, 1) + 1000 * i for i, (n, g) in enumerate([(8, 1), (16, 3)])]
    with meshes.use_mesh(mesh):
        joined = np.asarray(join([np.asarray(x) for x in lanes]))
    assert joined.shape == (8, 1 + 2 * 3, 1)
    for device, row in enumerate(joined[..., 0]):
        assert row.tolist() == [device, *range(1000 + 6 * device, 1006 + 6 * device)]
    for back, part in zip(split(joined, [(8, 1), (16, 3)]), lanes, strict=True):
        np.testing.assert_array_equal(back, part)
