"""What sampling costs, before it runs and measured:

    python -m experiments.complexity plan --config=FILE.py[:variant] [--config.key=value] [--calibrate] [--chip=h200]
    python -m experiments.complexity run --out=runs/complexity.jsonl [--sweeps=k,group,agents] [--k=1,2,4] ...
    python -m experiments.complexity report --out=runs/complexity.jsonl [--doc=docs/complexity.md]

``plan`` says what one step of a training configuration costs without running any of it: counts and tokens, bytes,
FLOPs, seconds on a chip at its peak; with ``--calibrate`` also the seconds of generation on this machine. Lengths are
the longest possible unless ``--prompt`` and ``--response`` give distributions (``8`` or ``4:0.5,12:0.5``). A plan
larger than memory is refused. ``run`` measures sweeps, one JSON line a setting; run again, it goes on where it was
stopped. ``report`` sets measured against predicted, and writes table and figure.
"""

from __future__ import annotations

import time
from typing import Any

from absl import flags

from experiments import cli

flags.DEFINE_string("prompt", None, "plan: tokens of a prompt, N or N:p,M:q; default: the most there may be.")
flags.DEFINE_string("response", None, "plan: tokens of a completion, likewise; default: team.max_new.")
flags.DEFINE_list(
    "chip", [], "plan: chips to give the time on (v5e, v5p, v6e, a100, h100, h200); memory is the first's."
)
flags.DEFINE_float("memory", None, "GiB that a plan may take; default: the chip's, or this machine's.", lower_bound=0)
flags.DEFINE_bool("calibrate", False, "plan: time generation on this machine (some seconds), and predict with it.")
flags.DEFINE_string("out", "runs/complexity.jsonl", "run, report: file of the measurements.")
flags.DEFINE_list("sweeps", ["k", "group", "agents"], "run: axes to sweep.")
flags.DEFINE_list("plans", ["node_wise_local", "node_wise", "product", "flat", "handoff"], "run: plans of k and group.")
flags.DEFINE_list("k", ["1", "2", "4", "8", "16", "32", "64"], "run: turns.")
flags.DEFINE_list("group", ["2", "4", "8", "16", "32", "64"], "run: samples a node.")
flags.DEFINE_list("agents", ["2", "4", "8", "16", "32", "64", "128", "256"], "run: agents that act at once.")
flags.DEFINE_list("share", ["shared", "lora", "separate"], "run: whose parameters the agents have.")
flags.DEFINE_integer("repeats", 5, "run: timed repeats of a setting.", lower_bound=3)
flags.DEFINE_integer("rounds", 3, "run: times that the sweeps of k and group are gone through.", lower_bound=1)
flags.DEFINE_integer("most", 20_000, "run: settings of more sequences are not run.", lower_bound=1)
flags.DEFINE_string("doc", "docs/complexity.md", "report: file whose section is written; the figure goes beside it.")

VERBS = ("plan", "run", "report")


def lengths(flag: str, text: str) -> dict[int, float]:
    """``8`` or ``4:0.5,12:0.5``."""
    from jaxmarl_llm.text import ConfigError

    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(n): float(*p) if p else 1.0 for n, *p in pairs}
    except (ValueError, TypeError):
        raise ConfigError(f"--{flag}: expected N or N:p,M:q (tokens, probabilities), got {text!r}") from None


def predict(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    from experiments.room import available, refuse
    from jaxmarl_llm import complexity as cx
    from jaxmarl_llm import costs
    from jaxmarl_llm.config import one_of
    from jaxmarl_llm.workload import kept, selected, workload_of

    for chip in flag_values.chip:
        one_of("--chip", chip, costs.CHIPS)
    plan = cli.recipe_module(cfg.recipe).make_plan(cfg)
    given = [None if (text := flag_values[f].value) is None else lengths(f, text) for f in ("prompt", "response")]
    work, notes = workload_of(cfg, *given)
    clock = time.perf_counter()
    chips = {name: costs.CHIPS[name] for name in flag_values.chip or costs.CHIPS}
    if flag_values.memory is not None:
        room, whose = int(flag_values.memory * 2**30), "--memory"
    elif flag_values.chip:
        room, whose = int(chips[flag_values.chip[0]].memory), flag_values.chip[0]
    else:
        room, whose = available(), "this machine"
    refuse(cfg, plan, work, room, whose, or_else=" (or raise --memory)")
    seen, held = cx.counts(plan, work), costs.memory(plan, work, **kept(cfg))
    groups, most = selected(cfg, work)
    if most is not None:
        notes.append(f"an update takes the {most} nodes that cost most: which are selected depends on rewards")
    if plan.stop_above is not None:
        notes.append("no state is left early (stop_above): counts are the most there may be")
    if cfg.team.invariant:
        notes.append("FLOPs, bytes and seconds of generation are those without team.invariant, which takes longer")
    update = costs.trained(plan, work, groups=groups, most=most, remat=cfg.team.remat)
    started = [costs.work_of(x, work.models[x.model]) for x in cx.launches(plan, work)]
    play = sum(w.prefill + w.decode for w in started)
    rows: list[tuple[str, Any, Any]] = [
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
        ("bytes of parameters", held.base + held.own, None),
        ("bytes of optimizer state", held.optimizer, None),
        ("bytes of cache at its peak", held.cache, held.unshared_cache),
        ("bytes in all, at least", held.least, None),
        ("FLOPs of the rollout", play, None),
        (f"FLOPs of the update ({cfg.loss.epochs} epochs)", update.flops * cfg.loss.epochs, None),
    ]
    print(f"{plan.name} on {cfg.env.name}: {work.tasks} tasks, {len(work.turns)} turns, {work.seats} acting at once")
    print(f"{'one step':38}{'shared prefixes':>20}{'without':>20}")
    for name, value, other in rows:
        print(f"{name:38}{_number(value):>20}{'' if other is None else _number(other):>20}".rstrip())
    for name, chip in chips.items():
        a, b = costs.roofline(chip, plan, work, update)
        print(f"{'seconds on ' + name + ', at least':38}{a + b * cfg.loss.epochs:>20.3g}   ({chip.source})")
    for note in notes:
        print(f"assumed: {note}")
    print(f"predicted in {time.perf_counter() - clock:.3f} s")
    if flag_values.calibrate:
        from experiments.sweeps import calibrate_generation

        model = work.models[0]
        found = calibrate_generation(model)
        seconds = found.predict(costs.features(plan, work))
        print(f"seconds of generation on this machine {seconds:.3g} (repeats spread by {found.spread:.0%})")
        if not found.stable:
            print("unstable: repeats lie too far apart (a busy machine?); calibrate again before relying on it")


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) < 1e15 and float(x).is_integer() else f"{x:,.2f}" if abs(x) < 1e9 else f"{x:.4g}"


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    if VERB == "plan":
        return predict(cfg, workdir, flag_values)
    from experiments import sweeps
    from experiments.room import available

    return sweeps.run(flag_values, available()) if VERB == "run" else sweeps.report(flag_values)


if __name__ == "__main__":
    VERB = cli.verb(VERBS)
    cli.run(main, required=("config",) if VERB == "plan" else ())
