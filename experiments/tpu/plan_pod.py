"""What a configuration would do on TPUs that are not there:

    python -m experiments.tpu.plan_pod --config=FILE.py[:variant] --topology=v5e:16x16 [--mesh=D,F,T[,C]] [--out=FILE]
    python -m experiments.tpu.plan_pod --config=FILE.py[:variant] --topology=v5p:8x8x8 --search
    python -m experiments.tpu.plan_pod --out=FILE.json --doc=docs/pods.md

Compiles generation and the update for the topology (libtpu beside JAX, no accelerator) and says, per chip: memory
against the chip's, FLOPs, bytes, bytes of collectives by kind, the time at public chip figures and what bounds it,
whether it fits and, when not, which flag would make it fit. Of --config.team.backbone.path the name suffices. With
several topologies there is a row for each. A program that --out has already is not compiled again. ``--search`` tries
meshes, micro-batches and remat by closed forms and compiles the best. ``--doc`` writes the table and the figure.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxmarl_llm.cli import config_flags

flags.DEFINE_list("topology", [], "TPU slices: kind:shape, as v5e:16x16, v5p:8x8x8, v6e:16x16.")
# Other entry points have flags of these names; tests import several of them into one process.
flags.DEFINE_string(
    "mesh",
    None,
    "data,fsdp,tensor and perhaps context in place of config.mesh; -1: the chips that remain.",
    allow_override=True,
)
flags.DEFINE_string("out", None, "JSON file of rows: added to, and read by --doc.", allow_override=True)
flags.DEFINE_bool("search", False, "Propose mesh, micro-batch and remat for each topology, and compile the best two.")
flags.DEFINE_integer("rows", None, "Nodes of each part of the mesh's rows (weak scaling), not those of the config.", 1)
flags.DEFINE_list("stages", [], "Programs to compile: rollout, accumulate, apply; default: all.")
flags.DEFINE_string(
    "doc", None, "Page whose table is written from --out; the figure goes to results/ beside it.", allow_override=True
)

PROGRAMS = ("rollout", "accumulate", "apply")
ROOM = 0.8  # of a chip that may be resident in what is advised: the rest is for cache and activations


def prepare(cfg: Any) -> tuple[Any, Any, Any, list[str]]:
    """Configuration without files, plan, workload, and assumptions."""
    from jaxmarl_llm.costs.known_shapes import shape_only
    from jaxmarl_llm.costs.workload import workload_of

    bare = shape_only(cfg)
    plan = config_flags.recipe_module(cfg.recipe).make_plan(bare)
    work, notes = workload_of(bare)
    models = tuple(w._replace(config=dataclasses.replace(w.config, used_vocab=None), extra=0) for w in work.models)
    if any(w.extra for w in work.models):
        notes.append("value heads and critics of their own are left out")
    return bare, plan, work._replace(models=models), notes


def measure(
    cfg: Any,
    name: str,
    topology: str,
    mesh_flag: str | None,
    rows: int | None,
    only: Sequence[str],
    known: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """One row: compile the programs, add up their costs, and check whether they fit. Programs in ``known`` rows are not
    compiled again, because teams with other parameter sharing have the same programs. Nothing is compiled if
    resident memory is already too large.
    """
    import jax
    import libtpu

    from experiments.tpu import compile_ahead
    from experiments.tpu.ratios import ratios
    from experiments.tpu.step_time import step_seconds
    from jaxmarl_llm.costs import hlo
    from jaxmarl_llm.costs import model as costs
    from jaxmarl_llm.costs.chips import CHIPS
    from jaxmarl_llm.costs.counts import LaunchPart
    from jaxmarl_llm.costs.meshes import largest_launch
    from jaxmarl_llm.costs.workload import memory_options
    from jaxmarl_llm.distributed import meshes
    from jaxmarl_llm.distributed.sharding import AXES, CONTEXT
    from jaxmarl_llm.models.rollout_weights import SAME

    bare, plan, work, notes = prepare(cfg)
    mesh = compile_ahead.mesh_for(bare, mesh_flag, topology)
    chip = CHIPS[topology.partition(":")[0]]
    kv_heads = [w.config.num_kv_heads for w in work.models]
    layout = meshes.layout_of(bare.mesh, mesh, kv_heads) if bare.mesh.has_layout else None
    team = compile_ahead.team_of(bare, mesh, work.models, memory_options(bare)["copies"], work.engine, layout)
    shape = compile_ahead.shape_of(bare, mesh, plan, work, rows, layout)
    held = {"parameters": team.parameter_bytes, "optimizer": team.optimizer_bytes, "rollout copy": team.playing_bytes}
    program = repr((team.policy.config, bare.team.remat, bare.loss, bare.optimizer, bare.sampling, mesh.shape, shape))
    program = f"{topology} lora={team.shared is not None} {sorted(only)} {program}"
    grid, blocks = (mesh, 1) if layout is None else layout[:2]
    cuts = mesh.shape["tensor"] if layout is None else layout.tensor  # devices that cut weights during generation
    if team.joined:
        program += f" {len(work.models)} adapters"
    if layout is not None:
        program += f" rollout {blocks} blocks, {grid.shape}"
    if bare.rollout_weights != SAME:
        program += f" {bare.rollout_weights}"
    if bare.rollout_cache != SAME:
        program += f" {bare.rollout_cache} cache"
    versions, date = {"jax": jax.__version__, "libtpu": libtpu.__version__}, datetime.date.today().isoformat()
    made = program, versions, hlo.VERSION
    same = next((r for r in known if (r["program"], r["versions"], r.get("counter")) == made and r["stages"]), None)
    if resident(bare, held) > chip.memory:
        stages = {}
    elif same is not None:
        stages = {
            k: compile_ahead.Stage(**{f: v[f] for f in compile_ahead.Stage._fields}) for k, v in same["stages"].items()
        }
        date = same["date"]  # when they were compiled
    else:
        stages = compile_ahead.compile_stages(bare, mesh, team, shape, only, layout)
    peaks = stage_peaks(bare, team, stages) or {"resident": resident(bare, held)}
    launch = largest_launch(plan, work)
    shaped = launch._replace(parts=tuple(LaunchPart(g, n, n, ()) for n, g in shape.parts))
    largest = max(work.models, key=lambda w: costs.parameters(w.config))  # the model that is compiled
    cache = costs.cache_bytes(shaped, largest)
    cache *= max(1, grid.shape["tensor"] // team.policy.config.num_kv_heads)  # heads that are copied
    row: dict[str, Any] = {
        "config": name,
        "topology": topology,
        "chips": mesh.size,
        "mesh": [mesh.shape[axis] for axis in (*AXES, CONTEXT) if axis in mesh.shape],
        "rollout": None if layout is None else [blocks, layout.tensor],
        "rows": rows,
        "share": bare.team.parameter_sharing,
        "models": len(work.models),
        "parameters": costs.parameters(team.policy.config),
        "batch": bare.batch,
        "program": program,
        "remat": bare.team.remat,
        "shape": shape._asdict(),
        "capacity": chip.memory,
        "held": held,
        "cache": cache // (mesh.size // (compile_ahead.context_of(mesh) if layout is None else 1)),
        "peaks": peaks,
        "stages": {k: s._asdict() | dict(zip(("roofline", "bound"), s.roofline(chip))) for k, s in stages.items()},
        "fits": bool(stages) and all(s.compiled for s in stages.values()) and max(peaks.values()) <= chip.memory,
        "notes": notes,
        "versions": versions,
        "counter": hlo.VERSION,
        "date": date,
    }
    if any(s.compiled for s in stages.values()):
        real = shape.parts
        if rows is None and blocks == 1:  # with blocks, every block is taken to be full
            real = tuple((min(n, part.rows), g) for (n, g), part in zip(shape.parts, launch.parts, strict=True))
        compiled = {k: s for k, s in stages.items() if s.compiled}
        row["ratios"] = ratios(largest, real, shape, mesh.size, cuts, row["cache"], compiled)
    row["advice"] = "" if row["fits"] else advice(bare, row, team.policy.config)
    if row["fits"] and set(stages) > {"prefill", "accumulate", "apply"}:
        row["step"] = step_seconds(bare, plan, work, chip, mesh, team, shape, stages, blocks)
    return row


def stage_peaks(cfg: Any, team: Any, stages: dict[str, Any]) -> dict[str, int]:
    """Bytes of a chip at the peak of each compiled stage: what the program needs, and what is resident beside it.

    cfg: configuration. team: shapes of the team, a `compile_ahead.Team`. stages: compiled programs by name.
    """
    from experiments.tpu.compile_ahead import chip_bytes as size

    own = size(team.own) + (0 if team.shared is None else size(team.shared))
    playing = size(team.playing)
    rest = team.parameter_bytes + team.optimizer_bytes
    away = team.optimizer_bytes if cfg.optimizer.offload else 0  # between updates
    # Of each program's arguments, those that are resident anyway; while generation runs, its copies are too.
    beside = {
        "prefill": rest - away + (team.playing_bytes - playing if team.playing_bytes else -own),
        "accumulate": rest - own,
        "apply": rest - size(team.own) - size(team.optimizer),
    }
    return {name: stages[name].least + bytes_ for name, bytes_ in beside.items() if name in stages}


def resident(cfg: Any, held: dict[str, int]) -> int:
    """Bytes of a chip that are always in use. An offloaded optimizer state and the copies for generation never exist at
    the same time.
    """
    beside = held["optimizer"], held["rollout copy"]
    return held["parameters"] + (max(beside) if cfg.optimizer.offload else sum(beside))


def advice(cfg: Any, row: dict[str, Any], arch: Any) -> str:
    """Flag whose change makes the largest stage fit, and its value."""
    from jaxmarl_llm.costs.meshes import axis_sizes, tensor_sizes

    worst = max(row["peaks"], key=lambda k: row["peaks"][k])
    peak, room, held = row["peaks"][worst], row["capacity"], row["held"]
    data, fsdp, tensor, context = axis_sizes(row["mesh"])
    wider = [t for t in tensor_sizes(arch, row["chips"]) if t > tensor]
    share = {"separate": "lora", "lora": "shared"}.get(cfg.team.parameter_sharing)
    playing = worst in ("prefill", "resident")
    copies, moments = held["rollout copy"] if playing else 0, held["optimizer"]
    if cfg.optimizer.offload and playing:  # one or the other, as in `resident`
        copies, moments = (copies, 0) if worst == "prefill" or copies >= moments else (0, moments)
    fixed = held["parameters"] + moments + copies
    gradient = 0 if playing else 8 * row["parameters"] // (fsdp * tensor * context)
    if fixed + gradient > room:
        cut = fixed - copies
        copy = (held["rollout copy"] if fsdp > 1 else held["parameters"]) if playing else 0
        enough = [t for t in wider if fixed * tensor / t <= ROOM * room]
        if data > 1 and copy + (cut + gradient) / data <= ROOM * room:
            flag = f"--config.mesh.data=1 --config.mesh.fsdp={data * fsdp}"
        elif enough:
            flag = f"--config.mesh.tensor={enough[0]}"
        elif share:
            flag = f"--config.team.parameter_sharing={share}"
        else:
            flag = "--topology with more or larger chips"
        what = "parameters, optimizer state and their copies alone"
    elif worst == "prefill":
        left = (room - fixed) / max(peak - fixed, 1)
        flag, what = f"--config.batch={int(cfg.batch * left)}", "the cache of the largest launch"
        if int(cfg.batch * left) < 1:
            flag = f"--config.mesh.tensor={wider[0]}" if wider else "--config.env.max_prompt, lower"
    else:
        what = "the update"
        tokens = row["shape"]["prompt"] + row["shape"]["micro_group"] * row["shape"]["response"]
        nodes = row["shape"]["micro"] // (data * fsdp)
        if not cfg.team.remat:
            flag = "--config.team.remat=true"
        elif nodes > 1:
            fewer = max(1, int(nodes * (room - fixed - gradient) / max(peak - fixed - gradient, 1)))
            flag = f"--config.micro_tokens={fewer * tokens}"
        elif wider:
            flag = f"--config.mesh.tensor={wider[0]}"
        else:
            flag = "--config.group or --config.env.max_prompt, lower"
    return f"too much in {worst}, {peak / 1e9:.1f} of {room / 1e9:.0f} GB: {what}; {flag}"


# ---- output ---------------------------------------------------------------------------------------------------------


def gb(x: float) -> str:
    return f"{x / 1e9:.2f}" if x >= 1e7 else f"{x / 1e9:.2g}"


def show(row: dict[str, Any]) -> None:
    axes = " ".join(f"{axis}={size}" for axis, size in zip(("data", "fsdp", "tensor", "context"), row["mesh"]))
    shape = row["shape"]
    prompts = " and ".join(f"{nodes} prompts x {group}" for nodes, group in shape["parts"])
    print(
        f"{row['config']} on {row['topology']}: {row['chips']} chips as {axes}; {row['models']} "
        f"model(s) of {row['parameters'] / 1e9:.2f}B, {row['share']}, batch {row['batch']}"
    )
    print(
        f"compiled: a launch of {prompts} completions of {shape['response']}, prompts of {shape['prompt']}; "
        f"a micro-batch of {shape['micro']} x {shape['micro_group']}"
    )
    held = ", ".join(f"{k} {gb(v)}" for k, v in row["held"].items())
    print(f"GB a chip, all models: {held}; cache {gb(row['cache'])}; the chip has {row['capacity'] / 1e9:.0f}")
    if row["stages"]:
        print(
            f"{'a chip, once':12}{'GB peak':>9}{'temp':>8}{'TFLOP':>10}{'GB r/w':>9}{'GB sent':>9}{'ms':>10}  bound by"
        )
    for name, s in row["stages"].items():
        peak = row["peaks"].get("prefill" if name == "decode" else name, 0.0)
        line = f"{name:12}{gb(peak):>9}{gb(s['temporary']):>8}"
        if s["compiled"]:
            sent = sum(s["collectives"].values())
            line += (
                f"{s['flops'] / 1e12:>10.4g}{gb(s['bytes']):>9}{gb(sent):>9}{1e3 * s['roofline']:>10.3f}  {s['bound']}"
            )
            kinds = ", ".join(f"{k} {gb(v)}" for k, v in s["collectives"].items() if v >= 5e6)
            line += f" ({kinds})" if kinds else ""
        print(line)
    if "step" in row:
        parts = ", ".join(f"{k} {v:.1f}" for k, v in row["step"]["seconds"].items())
        print(
            f"a step at the chips' peak: {row['step']['total']:.1f} s ({parts}); bottleneck {row['step']['bottleneck']}"
        )
    compiled = sum(s["seconds"] for s in row["stages"].values())
    verdict = "yes" if row["fits"] else "no. " + row["advice"]
    print(f"fits: {verdict}   (programs compiled in {compiled:.0f} s of CPU)")
    for note in row["notes"]:
        print(f"assumed: {note}")


def load(out: str | None) -> list[dict[str, Any]]:
    from jaxmarl_llm import json_files
    from jaxmarl_llm.errors import ConfigError

    path = Path(out) if out else None
    rows = json_files.read(path, nan=True) if path and path.exists() else []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--out: {path}: expected a list of objects")
    return rows


def replace(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Put ``row`` in the place of the row with its key, which an older counter made, or behind all."""
    at = next((i for i, r in enumerate(rows) if r["key"] == row["key"]), len(rows))
    rows[at : at + 1] = [row]


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> int:
    """Run the command. Returns 0 if every topology has a row that fits, otherwise 1."""
    from jaxmarl_llm.config import one_of
    from jaxmarl_llm.errors import ConfigError

    rows = load(flag_values.out)
    if flag_values.doc:
        from experiments.tpu import report as pods

        pods.write(rows, Path(flag_values.doc))
        return 0
    if cfg is None or not flag_values.topology:
        raise ConfigError("--config, --topology: expected both, or --doc with --out")
    from experiments.tpu import compile_ahead

    for stage in flag_values.stages:
        one_of("--stages", stage, PROGRAMS)
    for topology in flag_values.topology:
        compile_ahead.check(topology)
    code = 0
    for topology in flag_values.topology:
        fits = False
        tries = [(cfg, flag_values.mesh)]
        if flag_values.search:
            tries = searched(cfg, topology)
        for changed, mesh in tries:
            name = label(flag_values.config, changed)
            key = [name, topology, mesh, flag_values.rows, sorted(flag_values.stages)]
            row = {"key": key, **measure(changed, name, topology, mesh, flag_values.rows, flag_values.stages, rows)}
            if row not in rows:
                replace(rows, row)
                if flag_values.out:
                    Path(flag_values.out).write_text(json.dumps(rows, indent=1) + "\n")
            show(row)
            fits |= row["fits"]
        code |= not fits
    return int(code)


def searched(cfg: Any, topology: str) -> list[tuple[Any, str]]:
    """Print the best meshes, micro-batches and remat by closed forms, and return the best two: (config, mesh)."""
    from experiments.tpu import compile_ahead
    from jaxmarl_llm.costs.chips import CHIPS
    from jaxmarl_llm.costs.meshes import Proposal, proposals

    bare, plan, work, _ = prepare(cfg)
    best = proposals(bare, plan, work, CHIPS[topology.partition(":")[0]], compile_ahead.chips(topology))
    sizes = lambda p: ",".join(map(str, p.mesh))
    for p in best[:6]:
        given = f"{p.flags} --config.micro_tokens={p.micro_tokens} --config.team.remat={str(p.remat).lower()}"
        verdict = "fits" if p.fits else "too large"
        print(f"{verdict:10}{given}: {gb(p.memory.peak)} GB, {p.seconds:.1f} s (estimated)")

    def change(p: Proposal) -> Any:
        mesh = dataclasses.replace(cfg.mesh, **{k: v for k, v in p.settings.items() if k.startswith("rollout")})
        team = dataclasses.replace(cfg.team, remat=p.remat)
        return dataclasses.replace(cfg, micro_tokens=p.micro_tokens, team=team, mesh=mesh)

    return [(change(p), sizes(p)) for p in best[:2]]


def label(spec: str, cfg: Any) -> str:
    """Name of the variant, and the changes of the command line."""
    from jaxmarl_llm.config import flatten

    file, _, variant = spec.partition(":")
    base, now = flatten(config_flags.load(spec)), flatten(cfg)
    changed = [f"{k}={now[k]}" for k in now if now[k] != base.get(k)]
    return " ".join([f"{Path(file).stem}:{variant}" if variant else Path(file).stem, *changed])


if __name__ == "__main__":
    config_flags.run(main, required=())
