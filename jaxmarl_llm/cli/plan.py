"""Cost of one training step, predicted before anything runs:

    jaxmarl-llm plan --config=NAME[:variant] [--config.k=v] [--chip=h200] [--length=role:prompt:response ...]
    jaxmarl-llm plan --config=magrpo:tldr --chip=h100:8,v5e:256

The command prints counts, tokens, bytes, FLOPs, and seconds on a chip at its peak. It needs no weights. A backbone is
the name of a known shape, or a folder with config.json. Lengths are the largest possible ones unless they are given:

    --prompt, --response     of all roles: ``8``, or ``4:0.5,12:0.5`` (tokens and probabilities)
    --length                 of one role, ``role:prompt:response``; may be repeated. A part is ``8``, or
                             ``4=0.5,12=0.5``, or empty for what the other flags give
    --metrics                of a run (its folder or its metrics.jsonl): mean completion of each role in its last steps

A length by role goes before the metrics of a run, and these before ``--prompt`` and ``--response``. A plan that is
larger than memory ends with one line and exit code 2.

A chip with a count, such as ``h100:8``, is a set of devices. The command then prints the mesh that `costs.meshes`
chooses for the set, the bytes of one chip by part, and whether they fit. It ends with exit code 1 where a set does not
fit. A count of tpu7x is one of devices, two for each chip.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from jaxmarl_llm.cli import config_flags

flags.DEFINE_string("prompt", None, "plan: tokens of a prompt, N or N:p,M:q; default: the most there may be.")
flags.DEFINE_string("response", None, "plan: tokens of a completion, likewise; default: team.max_new_tokens.")
flags.DEFINE_multi_string("length", [], "plan: tokens of one role, role:prompt:response, a part is N or N=p,M=q.")
flags.DEFINE_string("metrics", None, "plan: folder of a run, or its metrics.jsonl, to take mean lengths by role from.")
flags.DEFINE_list(
    "chip",
    [],
    "plan: chips to give the time on (v4, v5e, v5p, v6e, tpu7x, a100, h100, h200), h100:8 for a set; memory is the "
    "first's.",
)
flags.DEFINE_float("memory", None, "GiB that a plan may take; default: the chip's, or this machine's.", lower_bound=0)


def lengths(flag: str, text: str, separator: str = ":") -> dict[int, float]:
    """Length distribution from text such as ``8`` or ``4:0.5,12:0.5``. Raises ConfigError.

    flag: name of the flag, for the message. separator: between tokens and probability.
    """
    from jaxmarl_llm.errors import ConfigError

    try:
        pairs = [part.split(separator) for part in text.split(",")]
        return {int(n): float(*p) if p else 1.0 for n, *p in pairs}
    except (ValueError, TypeError):
        form = f"N or N{separator}p,M{separator}q"
        raise ConfigError(f"--{flag}: expected {form} (tokens, probabilities), got {text!r}") from None


def given_lengths(flag_values: flags.FlagValues) -> tuple[Any, dict[str, Any], list[str]]:
    """Lengths of all roles, lengths by role, and notes on them. Raises ConfigError for a bad flag.

    flag_values: the parsed flags; ``prompt``, ``response``, ``length`` and ``metrics`` are read.
    """
    from jaxmarl_llm.costs.counts import mean
    from jaxmarl_llm.costs.workload import GivenLengths, lengths_of_run
    from jaxmarl_llm.errors import ConfigError
    from jaxmarl_llm.telemetry.metrics_file import read_metrics

    read = lambda f: None if (text := flag_values[f].value) is None else lengths(f, text)
    by_role: dict[str, Any] = {}
    notes: list[str] = []
    if flag_values.metrics is not None:
        path = Path(flag_values.metrics)
        folder = path.parent if path.name == "metrics.jsonl" else path
        source = f"--metrics={flag_values.metrics}"
        if not (folder / "metrics.jsonl").is_file():
            raise ConfigError(f"{source}: no file {folder / 'metrics.jsonl'}")
        by_role = lengths_of_run(read_metrics(folder), source)
        means = (f"{role} {mean(own.response or {}):.1f}" for role, own in by_role.items())
        notes.append(f"mean completions as in the last steps of {folder}: {', '.join(means)} tokens")
    for text in flag_values.length:
        role, *parts = text.split(":")
        if len(parts) != 2 or not role:
            raise ConfigError(f"--length: expected role:prompt:response, got {text!r}")
        prompt, response = (lengths("length", part, "=") if part else None for part in parts)
        before = by_role.get(role, GivenLengths())
        own = GivenLengths(prompt or before.prompt, response or before.response, f"--length={text}")
        by_role[role] = own
    return GivenLengths(read("prompt"), read("response")), by_role, notes


class Prediction(NamedTuple):
    """Plan and workload whose cost `predict` has printed."""

    plan: Any
    work: Any


def predict(cfg: Any, flag_values: flags.FlagValues) -> Prediction:
    """Print the cost of one training step of ``cfg``. Raises ConfigError for a bad flag and for too much memory.

    flag_values: the parsed flags of this command.
    """
    from jaxmarl_llm.costs import counts as cx
    from jaxmarl_llm.costs import model as costs
    from jaxmarl_llm.costs.chips import CHIPS, ChipSet, chip_set
    from jaxmarl_llm.costs.known_shapes import shape_only
    from jaxmarl_llm.costs.workload import memory_options, workload_of
    from jaxmarl_llm.runs.preflight import check_memory

    sets = {text: chip_set(text) for text in flag_values.chip}
    clock = time.perf_counter()
    given, by_role, notes = given_lengths(flag_values)
    bare = shape_only(cfg)
    replaced = [v for k, v in cfg.env.args.items() if bare.env.args.get(k) != v and isinstance(v, str)]
    notes += [f"the packaged tasks in place of {', '.join(replaced)}"] if replaced else []
    plan = config_flags.recipe_module(cfg.recipe).make_plan(bare)
    work, assumed = workload_of(bare, given, by_role)
    if flag_values.memory is not None or not any(":" in text for text in sets):
        check_memory(cfg, plan, work, *room(flag_values), or_else=" (or raise --memory)")
    update, more = update_of(bare, plan, work)
    seen, held = cx.counts(plan, work), costs.memory(plan, work, **memory_options(cfg))
    print(f"{plan.name} on {cfg.env.name}: {work.tasks} tasks, {len(work.turns)} turns, {work.seats} acting at once")
    print(f"{'one step':38}{'shared prefixes':>20}{'without':>20}")
    for name, value, other in [*count_rows(seen, update), *byte_rows(held), *flop_rows(plan, work, update, cfg)]:
        print(f"{name:38}{number(value):>20}{'' if other is None else number(other):>20}".rstrip())
    for name, those in (sets or {name: ChipSet(name, 1) for name in CHIPS}).items():
        a, b = costs.roofline(those.chip, plan, work, update)
        least = (a + b * cfg.loss.epochs) / those.size
        print(f"{'seconds on ' + name + ', at least':38}{least:>20.3g}   ({those.chip.source})")
    for note in [*notes, *assumed, *more, *remarks(cfg, plan, work)]:
        print(f"assumed: {note}")
    print(f"predicted in {time.perf_counter() - clock:.3f} s")
    return Prediction(plan, work)


def print_set(cfg: Any, plan: Any, work: Any, those: Any) -> bool:
    """Print what a set of chips holds and how long a step takes on it, and return whether it fits.

    cfg: configuration without files. plan: the recipe's plan. work: workload of ``cfg``. those: `costs.chips.ChipSet`.
    """
    from jaxmarl_llm.costs.meshes import fitting, mesh_sizes

    best = mesh_sizes(cfg, plan, work, those.chip, those.size)
    axes = ", ".join(f"{axis} {size}" for axis, size in zip(("data", "fsdp", "tensor", "context"), best.mesh))
    print(f"{those}, a mesh of {axes} ({best.flags})")
    held = best.memory
    parts = {k: v for k, v in held._asdict().items() if k != "offload"}
    rows = {k.replace("_", " "): v for k, v in parts.items()}
    rows |= {"in all, generating": held.generating, "in all, updating": held.updating}
    for name, value in rows.items():
        print(f"{'  bytes of a chip, ' + name:38}{number(round(value)):>20}")
    print(f"{'  seconds of a step, about':38}{best.seconds:>20.3g}")
    if best.fits:
        print(f"  fits: yes, a chip has {number(those.chip.memory)} bytes")
        return True
    other, changes = fitting(cfg, plan, work, those.chip, those.size)
    flags = " ".join(f"--config.{k}={str(v).lower()}" for k, v in changes.items())
    hint = "lower --config.batch, or share with --config.team.parameter_sharing=lora, or take more chips"
    if changes:
        hint = f"it fits with {other.flags} {flags}"
    print(f"  fits: no, a chip has {number(those.chip.memory)} bytes; {hint}")
    return False


def room(flag_values: flags.FlagValues) -> tuple[int, str]:
    """Bytes that a plan may take, and the name of what has them: ``--memory``, the first chip, or this machine.

    flag_values: the parsed flags; ``memory`` and ``chip`` are read.
    """
    from jaxmarl_llm.costs.chips import CHIPS
    from jaxmarl_llm.runs.preflight import host_memory

    if flag_values.memory is not None:
        return int(flag_values.memory * 2**30), "--memory"
    if flag_values.chip:
        return int(CHIPS[flag_values.chip[0]].memory), flag_values.chip[0]
    return host_memory(), "this machine"


def update_of(cfg: Any, plan: Any, work: Any) -> tuple[Any, list[str]]:
    """Size of a step's update (`costs.model.UpdateSize`), and what it assumes, one line each.

    cfg: configuration. plan: the recipe's plan. work: workload of ``cfg`` (`costs.counts.Workload`).
    """
    from jaxmarl_llm.costs import counts as cx
    from jaxmarl_llm.costs.model import UpdateSize, update_size
    from jaxmarl_llm.costs.workload import trained_shares, update_selection

    module, notes = config_flags.recipe_module(cfg.recipe), []
    if not hasattr(module, "algorithm"):
        return UpdateSize(0, 0, 0, 0, 0), ["updates train on a data set made before, not on this rollout: left out"]
    groups, most = update_selection(cfg, work)
    shares = trained_shares(cfg, module.algorithm(cfg), plan, work)
    remat = cfg.team.remat
    sizes = [update_size(plan, work, groups=groups, most=most, remat=remat, shares=share) for share in shares]
    levels = (x for x in cx.turn_states(plan, work) if x.group > 1 or not groups)
    if most is not None and most < sum(x.states * len(work.turns[x.branch.turn].seats) for x in levels):
        notes.append(
            f"rewards select {most} nodes (fewer where they are equal): tokens of the longest, FLOPs of the cheapest"
        )
    if len(sizes) > 1:
        notes.append("roles learn in turn: tokens of the step that trains most, FLOPs of the one that costs least")
    if any(0 < x < 1 for share in shares for x in share):
        notes.append("an update trains a part of the completions of a role; its FLOPs are the expectation")
    largest = max(sizes, key=lambda size: size.completion_tokens)
    return largest._replace(flops=min(size.flops for size in sizes)), notes


def remarks(cfg: Any, plan: Any, work: Any) -> list[str]:
    """Lines on what the figures leave out. Arguments are those of `update_of`."""
    notes = [f"an update has {cfg.loss.epochs} epochs"] if cfg.loss.epochs > 1 else []
    if plan.stop_above is not None:
        notes.append("no state is left early (stop_above): counts are the most there may be")
    if cfg.team.batch_invariant:
        notes.append(
            "FLOPs, bytes and seconds of generation are those without team.batch_invariant, which takes longer"
        )
    if work.engine == "host":
        notes.append("FLOPs and seconds, at least: prompts of a task begin alike and are cached, completions differ")
    return notes


Row = tuple[str, float, float | None]  # name, figure with shared prefixes, figure without


def count_rows(seen: Any, update: Any) -> list[Row]:
    """Rows of what is sampled and trained. seen: `costs.counts.Counts`. update: `costs.model.UpdateSize`."""
    return [
        ("decision points", seen.nodes, None),
        ("sampled sequences", seen.sequences, None),
        ("  at branching nodes", seen.branch_sequences, None),
        ("environment calls", seen.env_calls, None),
        ("generation launches", seen.launches, None),
        ("tokens prefilled", seen.prompt_tokens, seen.unshared_prompt_tokens),
        ("tokens decoded", seen.completion_tokens, None),
        ("decode steps in a row", seen.decode_steps, None),
        ("tokens trained, prompts", update.prompt_tokens, update.unshared_prompt_tokens),
        ("tokens trained, completions", update.completion_tokens, None),
    ]


def byte_rows(held: Any) -> list[Row]:
    """Rows of what is held. held: `costs.model.Memory`."""
    return [
        ("bytes of parameters", held.base + held.own, None),
        ("bytes of optimizer state", held.optimizer, None),
        ("bytes of cache at its peak", held.cache, held.unshared_cache),
        ("bytes in all, at least", held.peak_lower_bound, None),
    ]


def flop_rows(plan: Any, work: Any, update: Any, cfg: Any) -> list[Row]:
    """Rows of what is computed. A host rollout may cache prompts: what it computes without a cache has its own row.

    plan: the recipe's plan. work: workload of ``cfg``. update: `costs.model.UpdateSize`. cfg: configuration.
    """
    from jaxmarl_llm.costs import counts as cx
    from jaxmarl_llm.costs import model as costs

    done = [costs.least_work(x, work.models[x.model]) for x in cx.launches(plan, work)]
    decode, unshared = sum(w.decode for w in done), sum(w.unshared_prefill for w in done)
    rows: list[Row] = [("FLOPs of the rollout, at least", sum(w.prefill for w in done) + decode, unshared + decode)]
    if work.engine == "host":
        rows.append(("  no prompt begins as another", sum(w.uncached_prefill for w in done) + decode, None))
    return [*rows, ("FLOPs of the update, at least", update.flops * cfg.loss.epochs, None)]


def number(x: float) -> str:
    """Text of the figure ``x``: whole numbers in full below 10^15, others with two decimals below 10^9."""
    x = round(x) if isinstance(x, float) and abs(x) < 1e15 and abs(x - round(x)) < 1e-9 * abs(x) else x
    return f"{x:,.0f}" if abs(x) < 1e15 and float(x).is_integer() else f"{x:,.2f}" if abs(x) < 1e9 else f"{x:.4g}"


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> int:
    """Print the cost of one training step of ``cfg``. Returns 1 where a set of chips does not hold it, otherwise 0.

    workdir: not read. flag_values: the parsed flags.
    """
    from jaxmarl_llm.costs.chips import chip_set
    from jaxmarl_llm.costs.known_shapes import shape_only

    plan, work = predict(cfg, flag_values)
    counted = [chip_set(text) for text in flag_values.chip if ":" in text]
    return int(not all([print_set(shape_only(cfg), plan, work, those) for those in counted]))


if __name__ == "__main__":
    config_flags.run(main, required=("config",))
