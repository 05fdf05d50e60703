"""What every recipe's run shares: its base configuration, supervised fine-tuning, learning from a tree, remembering,
diagnosing, evaluating; and `fit`, the loop around a recipe's step, resumed by calling it again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm import __version__, memory
from jaxmarl_llm.arena import Arena, Demonstrations, EnvConfig, Played
from jaxmarl_llm.checkpoint import Checkpointer, digests
from jaxmarl_llm.config import diff, from_dict, to_dict
from jaxmarl_llm.credit import Credit, Credited, assign
from jaxmarl_llm.generate import bucket
from jaxmarl_llm.losses import aggregation_weights
from jaxmarl_llm.metrics import Logger, episodes_markdown, report
from jaxmarl_llm.plans import single
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Batch, Learner, Loss, Optimizer, pack, task_order, update_models
from jaxmarl_llm.types import Params, Team, TrainState


@dataclass(frozen=True)
class SFT:
    """Stage 0: supervised fine-tuning of every role on its own demonstrations."""

    steps: int = 0
    batch: int = 32  # samples of each role in a step
    samples: int = 2048  # demonstrations of each role to draw from
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True)
class RunConfig:
    checkpoint_every: int = 50  # steps; the last step is always saved
    keep: int = 2  # checkpoints
    eval_every: int = 50  # steps; 0: only before and after RL
    log_every: int = 10  # steps between console lines; metrics.jsonl has every step
    tensorboard: bool = True
    wandb_project: str | None = None
    max_bad_steps: int = 10  # in a row, whose loss or gradient was not finite, before the run stops
    max_logprob_gap: float = 0.05  # |sampler - learner| log-prob above which the run stops; 0 does not check
    episodes: int = 6  # written to episodes.md at the end

    def check(self, path: str) -> None:
        if self.checkpoint_every < 1 or self.keep < 1 or self.log_every < 1 or self.max_bad_steps < 1:
            raise ConfigError(f"{path}: checkpoint_every, keep, log_every and max_bad_steps must be >= 1")


@dataclass(frozen=True)
class BaseConfig:
    """Fields of every recipe. A recipe's Config adds its own and sets its defaults."""

    recipe: str
    seed: int = 0
    steps: int = 200  # of RL, after sft.steps of stage 0
    batch: int = 32  # tasks in a step
    team: TeamConfig = TeamConfig()
    env: EnvConfig = EnvConfig()
    sampling: Sampling = Sampling()
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "format": 1.0, "efficiency": -1.0})
    credit: Credit = Credit()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    micro_tokens: int = 16_384  # trunk tokens P + G R of one micro-batch
    sft: SFT = SFT()
    run: RunConfig = RunConfig()

    def check(self, path: str) -> None:
        if self.steps < 0 or self.batch < 1 or self.micro_tokens < 1:
            raise ConfigError(f"{path}: expected steps >= 0, batch >= 1 and micro_tokens >= 1")
        if self.sampling.temperature == 0:
            raise ConfigError(f"{path}.sampling.temperature: expected > 0 for training, got 0")


class Recipe(NamedTuple):
    """A recipe ready to run. ``init(step)`` is the state's structure at ``step`` (its values at step 0); ``step`` takes
    the state one step on; ``evaluate`` and ``episodes`` read it.
    """

    team: Team
    arena: Arena
    total_steps: int
    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Logger], tuple[TrainState, dict[str, float]]]
    evaluate: Callable[[TrainState], dict[str, float]]
    episodes: Callable[[TrainState], list[list[dict]]]


# -- stages ----------------------------------------------------------------------------------------------------------


def sft_step(
    team: Team, learners: Mapping[str, Learner], data: Mapping[str, Demonstrations], cfg: SFT, seed: int,
    state: TrainState,
) -> tuple[TrainState, dict[str, float]]:
    """One step of maximum likelihood for every role on its own samples: the policy update with advantage 1."""
    step, batches = int(state.step), {}
    for index, role in enumerate(team.roles):
        if role.name not in data or not len(data[role.name].length):
            continue
        d = data[role.name]
        rows = np.array(list(task_order(seed, len(d.length), step * cfg.batch, cfg.batch)))
        size = d.completion_length[rows]
        p = min(bucket(int(d.length[rows].max()), 64), d.tokens.shape[1])
        mask = np.arange(d.completions.shape[1]) < size[:, None]
        weights = np.asarray(aggregation_weights(mask, np.ones(len(rows), np.float32), "token"))[:, None]
        zeros = np.zeros_like(weights)
        batch = Batch(d.tokens[rows, :p], d.length[rows], d.completions[rows][:, None], weights, zeros + 1, zeros)
        batches.setdefault(team.roles[index].model, []).append(batch)
    params, opt_state, metrics = update_models(
        team.models, learners, SFT_LOSS, state.params, state.opt_state, batches)
    out = {f"sft/{name}/nll": m["nll"] for name, m in metrics.items()}
    out["sft/nll"] = float(np.mean([m["nll"] for m in metrics.values()]))
    out["bad"] = float(any(not m["ok"] for m in metrics.values()))
    return state.replace(params=params, opt_state=opt_state), out


SFT_LOSS = Loss(clip_low=None)


def learn(
    team: Team, learners: Mapping[str, Learner], cfg: BaseConfig, state: TrainState, played: Played,
    advantages: np.ndarray, trained: np.ndarray, reference: Params | None = None,
) -> tuple[TrainState, dict[str, dict[str, float]]]:
    """Update the models that own trained steps; the others stay the same arrays."""
    # The prompts of array environments are all short: one shape. Others come in buckets.
    tables = played.tree.nodes.tokens.shape[1], played.tree.steps.tokens.shape[1]
    smallest = tables if played.records is None else (64, 16)
    batches = {
        m.name: pack(played.tree, i, advantages, trained, cfg.loss, micro_tokens=cfg.micro_tokens, smallest=smallest)
        for i, m in enumerate(team.models)
    }
    params, opt_state, metrics = update_models(
        team.models, learners, cfg.loss, state.params, state.opt_state, batches, reference)
    return state.replace(params=params, opt_state=opt_state), metrics


_update_memory = jax.jit(memory.update, static_argnames=("config",))


def remember(
    team: Team, arena: Arena, config: memory.MemoryConfig, state: TrainState, played: Played, signal: np.ndarray,
    valid: np.ndarray,
) -> tuple[TrainState, dict[str, float]]:
    """Every role's memory learns from its own steps and their ``signal`` [C] (JoyAgents-R1: R_A + R_F)."""
    tree, stores, metrics = played.tree, dict(state.memory), {}
    role_of = tree.nodes.role[tree.steps.node]
    for index, role in enumerate(team.roles):
        rows = np.flatnonzero(valid & (role_of == index))
        store = stores[role.name]
        if len(rows):
            ids, length, texts = arena.lessons(team, played, rows)
            nodes, size = tree.steps.node[rows], bucket(len(rows), 32)
            read = tree.nodes.retrieved
            text = np.zeros((len(rows), store.text.shape[1]), np.uint8)
            for k, t in enumerate(texts):
                raw = t.encode("utf-8", "replace")[: text.shape[1]].decode("utf-8", "ignore").encode()
                text[k, : len(raw)] = np.frombuffer(raw, np.uint8)
            grow = lambda x: np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])
            samples = memory.Samples(
                keys=grow(read.query[nodes][:, : store.key.shape[1]]), ids=grow(ids), length=grow(length),
                text=grow(text), reward=grow(signal[rows].astype(np.float32)), retrieved=grow(read.slots[nodes]),
                similarity=grow(read.similarity[nodes]), valid=grow(np.ones(len(rows), bool)))
            stores[role.name], seen = _update_memory(config, store, samples, state.step)
            metrics |= {f"memory/{role.name}/{k}": float(v) for k, v in seen.items()}
            metrics[f"agent/{role.name}/memory_hit"] = float(seen["hit"])
        metrics[f"agent/{role.name}/memory_size"] = float(memory.size(stores[role.name]))
    return state.replace(memory=stores), metrics


# -- reading a step --------------------------------------------------------------------------------------------------


def credit(cfg: BaseConfig, team: Team, arena: Arena, played: Played, tasks: int, weights: Mapping[str, float],
           discount: float | None = None) -> Credited:
    """Credit the tree under reward ``weights``; numpy arrays."""
    rule = cfg.credit if discount is None else dataclasses.replace(cfg.credit, discount=discount)
    return jax.device_get(assign(
        rule, played.tree, weights=tuple(sorted(weights.items())), max_turns=arena.env.max_turns, num_tasks=tasks,
        num_roles=len(team.roles)))


def diagnose(
    cfg: BaseConfig, team: Team, arena: Arena, played: Played, credited: Credited, selected: np.ndarray,
    updated: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """The metrics of one step, by the naming scheme of metrics.py."""
    tree = played.tree
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    out = {f"count/{k}": float(v) for k, v in dataclasses.asdict(tree.counts).items()}
    ended = moves.valid & moves.done
    starts = moves.valid & (moves.parent < 0)
    total = 0.0
    for name, values in moves.rewards.items():
        # A component's mean over episodes; each transition counts by its share of the episodes through it.
        mean = _episode_mean(moves, values[:, 0]) if starts.any() else float("nan")
        out[f"reward/{name}"] = mean
        total += cfg.reward.get(name, 0.0) * mean
    out["reward/total"] = total
    out["success"] = float("nan") if not ended.any() else out.get("reward/accuracy", total)
    out["reward/invalid_share"] = float(moves.played.sum() - moves.valid.sum()) / max(1, int(moves.played.sum()))
    role_of, turn_of = nodes.role[steps.node], nodes.turn[steps.node]
    multi = credited.stats.count >= 2
    flat = multi & (credited.stats.high == credited.stats.low)
    for index, role in enumerate(team.roles):
        mine = credited.valid & (role_of == index)
        if not mine.any():
            continue
        groups = multi & (credited.group_role == index)
        key = f"agent/{role.name}/"
        out[key + "reward"] = float(credited.returns[mine].mean())
        out[key + "length"] = float(steps.length[mine].mean())
        out[key + "truncated"] = float(steps.truncated[mine].mean())
        if groups.any():
            out[key + "variance"] = float(credited.stats.variance[groups].mean())
            out[key + "zero_variance"] = float(flat[groups].mean())
            out[key + "selected"] = float(selected[groups].mean())
        m = updated.get(role.model)
        out[key + "updated"] = float(m is not None)
        if m is not None:
            names = {"entropy": "entropy", "grad_norm": "grad_norm", "clip_fraction": "clip_fraction",
                     "ref_kl": "kl", "logprob_gap": "logprob_gap", "nll": "nll", "ratio": "ratio"}
            out |= {key + to: m[k] for k, to in names.items() if k in m}
    for turn in range(arena.env.max_turns):
        groups = multi & (credited.group_turn == turn)
        if groups.any() and (turn_of[credited.valid] == turn).any():
            out[f"node/{turn}/variance"] = float(credited.stats.variance[groups].mean())
            out[f"node/{turn}/zero_variance"] = float(flat[groups].mean())
            out[f"node/{turn}/selected"] = float(selected[groups].mean())
    out["bad"] = float(any(not m["ok"] for m in updated.values()))
    out["logprob_gap"] = max((m["logprob_gap"] for m in updated.values()), default=0.0)
    return out


def _episode_mean(moves: Any, values: np.ndarray) -> float:
    """Mean over tasks of the sum of ``values`` along an episode, siblings averaged: the root value without discount."""
    valid = moves.valid
    order = np.argsort(-moves.turn, kind="stable")
    below, count = np.zeros(len(values)), np.zeros(len(values))
    total = np.zeros(len(values))
    for j in order:
        if valid[j]:
            total[j] = values[j] + (below[j] / count[j] if count[j] else 0.0)
            if moves.parent[j] >= 0:
                below[moves.parent[j]] += total[j]
                count[moves.parent[j]] += 1
    return float(total[valid & (moves.parent < 0)].mean())


def evaluate(
    cfg: BaseConfig, team: Team, arena: Arena, state: TrainState, memory_config: memory.MemoryConfig | None,
    samplings: Mapping[str, Sampling] | None = None,
) -> dict[str, float]:
    """Held-out tasks, one episode each: ``eval/success`` as the policy samples, ``eval/success_greedy``; rewards."""
    samplings = samplings or {"": cfg.sampling, "_greedy": Sampling(temperature=0.0)}
    out = {}
    count = len(jax.tree.leaves(arena.held_out)[0]) if arena.array else len(arena.held_out)
    chunk = count if arena.array else min(count, 4 * cfg.batch)
    for suffix, sampling in samplings.items():
        totals: dict[str, list[float]] = {}
        for start in range(0, count, chunk):
            indices = range(start, min(start + chunk, count))
            key = jax.random.fold_in(jax.random.key(cfg.seed), 2**31 + start)
            played = arena.play(team, state.params, state.memory, indices, single(), key, sampling, memory_config,
                                version=int(state.step), held_out=True)
            for name, values in played.tree.transitions.rewards.items():
                totals.setdefault(name, []).append(_episode_mean(played.tree.transitions, values[:, 0]) * len(indices))
        out |= {f"eval/{name}{suffix}": sum(v) / count for name, v in totals.items()}
        if "accuracy" in totals:
            out[f"eval/success{suffix}"] = out[f"eval/accuracy{suffix}"]
    return out


def episodes_of(team: Team, played: Played, credited: Credited, selected: np.ndarray, count: int) -> list[list[dict]]:
    """The first line of play of the first tasks, for people."""
    tree, out = played.tree, []
    moves = tree.transitions
    for task in range(count):
        parent, episode = -1, []
        while True:
            here = np.flatnonzero(moves.played & (moves.task == task) & (moves.parent == parent))
            if not len(here):
                break
            j = int(here[0])
            for s in moves.steps[j][moves.steps[j] >= 0]:
                group = credited.group[s]
                episode.append({
                    "turn": int(moves.turn[j]), "role": team.roles[tree.nodes.role[tree.steps.node[s]]].name,
                    "prompt": played.prompt_text(int(s)), "completion": played.completion_text(int(s)),
                    "rewards": {k: float(v[j, 0]) if moves.valid[j] else None for k, v in moves.rewards.items()},
                    "advantage": float(credited.advantage[s]), "selected": bool(selected[group])})
            parent = j
        if episode:
            out.append(episode)
    return out


# -- the loop --------------------------------------------------------------------------------------------------------


def fit(cfg: BaseConfig, recipe: Recipe, workdir: str | Path, *, allow_config_change: Sequence[str] = (),
        quiet: bool = False) -> TrainState:
    """Train to the last step, from the newest checkpoint in ``workdir`` when there is one.

    Writes metrics.jsonl, TensorBoard events, checkpoints/, config.json, and at the end report.png and episodes.md.
    """
    workdir = Path(workdir)
    saver = Checkpointer(workdir, keep=cfg.run.keep)
    meta = saver.read_meta()
    if meta is not None:
        _check_same(cfg, meta, allow_config_change)
    resumed = None
    state = recipe.init(0 if meta is None else int(meta["step"]))
    shared = state.params["shared"]
    backbone = fingerprint_of(shared)
    if meta is not None:
        if meta["backbone"] != backbone:
            raise ConfigError(f"{workdir}: the shared backbone is not the one this run was trained on")
        got = saver.restore(_without_shared(state))
        assert got is not None
        state, resumed = got[0], got[2]
        state = state.replace(params={**state.params, "shared": shared})
    workdir.mkdir(parents=True, exist_ok=True)
    save = lambda: saver.save(int(state.step), _without_shared(state), _meta(cfg, int(state.step), backbone))
    with Logger(
        workdir, resume_step=resumed, total_steps=recipe.total_steps, interval=cfg.run.log_every,
        tensorboard=cfg.run.tensorboard, wandb_project=cfg.run.wandb_project,
    ) as logger:
        if resumed is not None:
            logger.print(f"resumed {workdir} at step {resumed}")
        bad = 0
        while int(state.step) < recipe.total_steps:
            step = int(state.step)
            extra = recipe.evaluate(state) if _evaluates(cfg, step) else {}
            state, metrics = recipe.step(state, logger)
            step += 1
            state = state.replace(step=jnp.int32(step))
            bad = bad + 1 if metrics.pop("bad", 0.0) else 0
            skipped = state.counters["skipped"] + int(bad > 0)
            state = state.replace(counters={**state.counters, "skipped": skipped})
            if step == recipe.total_steps:
                extra |= {f"final/{k.removeprefix('eval/')}": v for k, v in recipe.evaluate(state).items()}
            logger.log(step, {**metrics, **extra, "count/skipped": float(skipped)})
            if bad >= cfg.run.max_bad_steps:
                raise FloatingPointError(
                    f"step {step}: {bad} steps in a row had a loss or gradient that is not finite; stopped. "
                    f"The last good checkpoint is step {saver.steps()[-1:] or 'none'}")
            gap = metrics.get("logprob_gap", 0.0)
            if cfg.run.max_logprob_gap and gap > cfg.run.max_logprob_gap:
                raise FloatingPointError(
                    f"step {step}: sampler and learner log-probs differ by {gap:.3g} > run.max_logprob_gap="
                    f"{cfg.run.max_logprob_gap:g}; the update would be biased")
            if step % cfg.run.checkpoint_every == 0 or step == recipe.total_steps:
                save()
        saver.close()
        if (workdir / "metrics.jsonl").exists() and recipe.total_steps:
            report(workdir)
            episodes_markdown(recipe.episodes(state), workdir / "episodes.md")
            logger.print(f"wrote {workdir / 'report.png'} and {workdir / 'episodes.md'}")
    return state


def _evaluates(cfg: BaseConfig, step: int) -> bool:
    """Before the first RL step, and every ``eval_every`` steps of RL."""
    rl = step - cfg.sft.steps
    return rl == 0 or (rl > 0 and cfg.run.eval_every > 0 and rl % cfg.run.eval_every == 0)


def _without_shared(state: TrainState) -> TrainState:
    """The frozen backbone is a function of the configuration; its fingerprint is saved instead."""
    return state.replace(params={k: v for k, v in state.params.items() if k != "shared"})


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    import jaxlib

    return {"jaxmarl_llm": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
            "python": platform.python_version(), "device": jax.devices()[0].device_kind}


def _meta(cfg: BaseConfig, step: int, backbone: str) -> dict[str, Any]:
    return {"step": step, "config": to_dict(cfg), "versions": _versions(), "backbone": backbone}


def fingerprint_of(tree: Any) -> str:
    """One SHA-256 for a tree of arrays."""
    return hashlib.sha256(json.dumps(digests(tree), sort_keys=True).encode()).hexdigest()


# What may differ between the runs that make up one: none of it changes a computed value.
FREE = ("config.steps", "config.run.", "config.env.workers", "config.env.timeout")


def _check_same(cfg: BaseConfig, meta: Mapping[str, Any], allowed: Sequence[str]) -> None:
    changed = diff(from_dict(type(cfg), meta["config"]), cfg)
    changed = [c for c in changed if not c.startswith(FREE) and c.split(":")[0].removeprefix("config.") not in allowed]
    if changed:
        raise ConfigError(
            f"the workdir holds a run with another configuration: {'; '.join(changed)}; use a new --workdir, or "
            f"--allow_config_change={','.join(c.split(':')[0].removeprefix('config.') for c in changed)}")
