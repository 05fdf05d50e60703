"""Measurements of `experiments.studies.complexity`: sweeps over turns, samples and agents, calibration, table, figure.

Sweeps over turns and samples use a host environment, through the engine of training. Two agents alternate, and answer
prompts of 16 tokens with exactly 8 tokens, because no stop id can be sampled. The sweep over agents is one compiled
program. N agents act at the same time in an array environment, each with its own parameters over one base, with a
rollout and an update.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.studies.common import figure_beside, replace_section
from jaxmarl_llm import json_files
from jaxmarl_llm.config import one_of
from jaxmarl_llm.costs import counts as cx
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv, Message, Prompt
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout import plans
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.losses import Loss, aggregation_weights
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Array, Model, Role, Team

SWEEPS = ("k", "group", "agents")
PROMPT, RESPONSE = 16, 8
PLANS: dict[str, Callable[[int], plans.Plan]] = {
    "node_wise_local": lambda g: plans.node_wise(g, "local"),
    "node_wise": plans.node_wise,
    "product": plans.product,
    "flat": plans.flat,
    "handoff": lambda g: plans.handoff(g, best=False),
}
BYTES = ByteTokenizer()
# Ids of stop tokens are beyond ``used_vocab``: they are never sampled, and every completion has its full length.
TINY = Config(264, 64, 192, 2, 4, 2, 16, used_vocab=256)
AGENT = Config(264, 16, 32, 1, 2, 1, 8, used_vocab=256)
# Calibration: settings whose features differ, none of them in a sweep. (plan, turns, samples, tasks)
CALIBRATION = (
    ("node_wise_local", 3, 3, 3),
    ("node_wise_local", 6, 3, 6),
    ("node_wise_local", 6, 12, 3),
    ("node_wise_local", 5, 6, 12),
    ("flat", 5, 12, 3),
    ("flat", 3, 48, 3),
    ("node_wise", 7, 3, 3),
    ("product", 3, 5, 3),
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of a file of measurements. Its fields are its key."""

    sweep: str  # k, group, agents or calibration
    plan: str
    turns: int
    group: int
    agents: int
    share: str
    tasks: int
    round: int = 0

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def settings(f: flags.FlagValues) -> Iterator[Setting]:
    """All settings: calibration first, then the sweeps by size. Rounds are the outer loop, so that a slow minute
    affects many settings.
    """
    for name in f.sweeps:
        one_of("--sweeps", name, SWEEPS)
    for name in f.plans:
        one_of("--plans", name, PLANS)
    for name in f.share:
        one_of("--share", name, ("shared", "lora", "separate"))
    ks, groups, agents = numbers("k", f.k, 1), numbers("group", f.group, 1), numbers("agents", f.agents, 1)
    for r in range(f.rounds):
        if "k" in f.sweeps or "group" in f.sweeps:
            for plan, k, g, tasks in CALIBRATION:
                yield Setting("calibration", plan, k, g, 2, "shared", tasks, r)
        if "k" in f.sweeps:
            yield from (Setting("k", plan, k, 4, 2, "shared", 4, r) for k in ks for plan in f.plans)
        if "group" in f.sweeps:
            yield from (Setting("group", plan, 4, g, 2, "shared", 4, r) for g in groups for plan in f.plans)
    if "agents" in f.sweeps:  # one round: a setting is a program of its own, compiled again every time
        yield from (Setting("agents", "flat", 1, 4, n, share, 4) for n in agents for share in f.share)


def numbers(flag: str, given: Sequence[str], least: int) -> list[int]:
    try:
        out = sorted({int(x) for x in given})
    except ValueError:
        raise ConfigError(f"--{flag}: expected whole numbers, got {','.join(given)}") from None
    if not out or out[0] < least:
        raise ConfigError(f"--{flag}: expected numbers >= {least}, got {','.join(given) or 'none'}")
    return out


def workload(s: Setting) -> tuple[plans.Plan, cx.Workload]:
    if s.sweep == "agents":
        models, width = 1 if s.share == "shared" else s.agents, 4
        weights = cx.ModelSize(AGENT, 2 if s.share == "lora" else 0)
        speakers = tuple(cx.RoleLengths(i % models, ({width: 1.0},), {4: 1.0}, 4) for i in range(s.agents))
        at_once = (cx.Turn(tuple({i: 1.0} for i in range(s.agents))),)
        batch_models = s.share != "shared"
        return plans.flat(s.group), cx.Workload(
            at_once, speakers, (weights,) * models, s.tasks, "array", width, s.agents, batch_models
        )
    speaker = cx.RoleLengths(0, ({PROMPT: 1.0},), {RESPONSE: 1.0}, RESPONSE)
    turns = tuple(cx.Turn(({t % s.agents: 1.0},)) for t in range(s.turns))
    return PLANS[s.plan](s.group), cx.Workload(turns, (speaker,) * s.agents, (cx.ModelSize(TINY),), s.tasks)


# ---- measuring ------------------------------------------------------------------------------------------------------


def ring(agents: int, turns: int) -> HostEnv:
    """Environment in which agents act in turn. The reward depends on the first byte of a completion.

    A prompt starts with the seed of the state. With equal prompts, the engine would prefill the shared part once.
    """
    names = tuple(f"a{i}" for i in range(agents))

    def observe(state: tuple[int, int]) -> dict[str, Prompt]:
        turn, seed = state
        ids = (*seed.to_bytes(8, "big"), *range(65, 65 + PROMPT))[:PROMPT]
        return {names[turn % agents]: (Message("raw", "", ids),)}

    def step(seed: int, state: tuple[int, int], actions: Any) -> tuple[tuple[int, int], dict, bool]:
        ((role, said),) = actions.items()
        turn = state[0] + 1
        return (turn, seed), {role: {"pay": float(said.ids[0] % 2)}}, turn >= turns

    verify = lambda state: {names[0]: {"pay": 1.0}}
    return HostEnv("ring", names, turns, ("pay",), lambda seed, task: (0, seed), observe, step, verify)


def measure_host(s: Setting) -> Callable[[], dict[str, int]]:
    """Function that runs one rollout and returns the counters of the engine. It is prepared here, but not compiled."""
    policy, env = make_policy(TINY), ring(s.agents, s.turns)
    team = Team(tuple(Role(r, "team", RESPONSE) for r in env.roles), (Model("team", policy, BYTES),))
    params = {"shared": {}, "agents": {"team": {"params": jax.jit(policy.init)(jax.random.key(0))}}}
    pool, plan = EnvPool(lambda: env, workers=0), PLANS[s.plan](s.group)

    def once() -> dict[str, int]:
        settings = HostSettings(plan, Sampling(), max_prompt=64)
        got = play(team, params, pool, range(s.tasks), jax.random.key(1), settings)
        return {name: int(value) for name, value in vars(got.tree.counts).items()}

    return once


def crowd(agents: int) -> ArrayEnv:
    """Environment of one turn in which all agents act. Each agent's reward is the parity of its first token."""
    seat = jnp.arange(agents)

    def observe(state: jax.Array) -> Observation:
        tokens = jnp.stack([0 * seat + state % 26, seat % 26, seat // 26, 0 * seat], axis=1) + 65
        return Observation(seat, tokens, jnp.full((agents,), 4), jnp.ones((agents,), bool))

    def step(key: jax.Array, state: jax.Array, tokens: jax.Array, length: jax.Array) -> Any:
        return state, {"pay": (tokens[:, 0] % 2).astype(jnp.float32)}, jnp.bool_(True)

    names, everyone = tuple(f"a{i}" for i in range(agents)), tuple(range(agents))
    return ArrayEnv("crowd", names, agents, 1, ("pay",), (everyone,), lambda key, task: task, observe, step)


def many_agents(s: Setting) -> tuple[Callable, Any]:
    """Functions and initial state of one step of all agents: (step, state). step(state, key) -> (state, counts).

    The step is a rollout and an update. Its arrays of parameters and optimizer states have a leading axis of models.
    """
    policy, env = make_policy(AGENT, remat=False), crowd(s.agents)
    plan, work = workload(s)
    models, lora = len(work.models), s.share == "lora"
    names = [f"m{i}" for i in range(models)]
    team = Team(
        tuple(Role(r, names[i % models], 4) for i, r in enumerate(env.roles)),
        tuple(Model(n, policy, BYTES, "base" if lora else None) for n in names),
    )
    rollout = make_rollout(dataclasses.replace(team, batch_models=work.batch_models), env, plan, Sampling())
    learner = make_learner(policy, Loss(clip_low=None), Optimizer(), Sampling())
    base = jax.jit(policy.init)(jax.random.key(0))
    fresh = lambda key: {"lora": init_lora(key, base, 2)} if lora else {"params": policy.init(key)}
    own = jax.jit(jax.vmap(fresh))(jax.random.split(jax.random.key(1), models))
    start = own, jax.jit(jax.vmap(learner.init))(own)
    tasks = jnp.arange(s.tasks)

    def step(state: Any, base: Any, key: jax.Array) -> Any:
        own, moments = state
        agents = {n: jax.tree.map(lambda x, i=i: x[i], own) for i, n in enumerate(names)}
        tree = rollout({"shared": {"base": base}, "agents": agents}, {}, tasks, key, 0)
        earned = scalarise(tree.transitions.rewards, {"pay": 1.0})  # [B G, N]
        earned = earned.reshape(s.tasks, s.group, s.agents).swapaxes(1, 2)
        advantage = earned - earned.mean(-1, keepdims=True)  # [B, N, G]: each node's samples against their siblings
        weights = jax.vmap(lambda m: aggregation_weights(m, jnp.ones(m.shape[0]), "token"))

        def mine(x: Array, *shape: int) -> Array:
            """Nodes of each model: [B N ...] or [B N G ...] -> [models, nodes of each, ...]."""
            x = x.reshape(s.tasks, models, s.agents // models, *shape)
            return x.swapaxes(0, 1).reshape(models, -1, *shape)

        steps, r = tree.steps, tree.steps.tokens.shape[1]
        mask = mine(steps.loss_mask, s.group, r)
        batch = Batch(
            mine(tree.nodes.tokens, tree.nodes.tokens.shape[1]),
            mine(tree.nodes.length),
            mine(steps.tokens, s.group, r),
            weights(mask.reshape(models, -1, r)).reshape(mask.shape),
            jnp.broadcast_to(mine(advantage, s.group)[..., None], mask.shape),
            mine(steps.logprobs, s.group, r),
        )
        shared = base if lora else None
        one = lambda own, batch: learner.accumulate(own, shared, batch, None)
        gradient, seen, _ = jax.vmap(one)(own, batch)
        own, moments, _, _ = jax.vmap(learner.apply)(own, moments, gradient, seen["loss"])
        return (own, moments), tree.counts

    return jax.jit(step, donate_argnums=0), (start, base)


def measure_agents(s: Setting) -> Callable[[], dict[str, int]]:
    step, (state, base) = many_agents(s)
    held, key = [state], [0]

    def once() -> dict[str, int]:
        key[0] += 1
        held[0], seen = step(held[0], base, jax.random.key(key[0]))
        jax.block_until_ready(held[0])
        return {name: int(value) for name, value in vars(jax.device_get(seen)).items()}

    return once


def measure(s: Setting, repeats: int) -> dict[str, Any]:
    """One row: predictions, counts, and seconds of each repeat after a first run that compiles."""
    plan, work = workload(s)
    once = measure_agents(s) if s.sweep == "agents" else measure_host(s)
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    clock = time.perf_counter()
    counted = once()
    first = time.perf_counter() - clock
    jax.monitoring.unregister_event_duration_listener(listen)
    seconds = []
    for _ in range(repeats):
        clock = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - clock)
    return {
        **dataclasses.asdict(s),
        "predicted": cx.counts(plan, work)._asdict(),
        "bytes": costs.memory(plan, work)._asdict(),
        "features": costs.features(plan, work),
        "counted": counted,
        "seconds": seconds,
        "first": first,
        "compiled": len(compiled),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "load": os.getloadavg()[0],
    }


def read(path: Path) -> list[dict]:
    """Rows of a file of measurements. An incomplete last line, left by a killed process, is removed from the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    rows = []
    form = {f.name: {"str": str, "int": int}[str(f.type)] for f in dataclasses.fields(Setting)}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        where = f"--out: {path}:{number}"
        row = json_files.parse(json_files.decoded(line, where), where)
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object, found {json_files.shown(row)}")
        json_files.check(row, form, where)
        rows.append(row)
    return rows


def key_of(row: dict) -> str:
    return json.dumps({f.name: row[f.name] for f in dataclasses.fields(Setting)})


def run(f: flags.FlagValues, room: int) -> None:
    """Measure every setting that is not in the file. A setting larger than ``room`` bytes is recorded as refused."""
    from rich.progress import track

    path = Path(f.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {key_of(row) for row in read(path)}
    todo = [s for s in settings(f) if s.key not in done]
    print(f"{len(done)} settings in {path}, {len(todo)} to run", flush=True)
    for s in track(todo, description="sweeps"):
        plan, work = workload(s)
        need, sequences = costs.memory(plan, work).peak_lower_bound, cx.counts(plan, work).sequences
        row = dataclasses.asdict(s) | {"predicted": cx.counts(plan, work)._asdict(), "bytes": {"least": need}}
        if need > room:
            row["refused"] = f"needs at least {need} bytes of {room}"
        elif sequences > f.most:
            row["refused"] = f"{sequences} sequences are more than --most={f.most}"
        else:
            row = measure(s, f.repeats)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


# ---- calibration ----------------------------------------------------------------------------------------------------


def calibrate_generation(weights: cx.ModelSize, repeats: int = 5) -> costs.Calibration:
    """Seconds of generation on this machine, from small launches of one model with random weights."""
    policy = make_policy(weights.config)
    params = {"params": jax.jit(policy.init)(jax.random.key(0))}
    if weights.rank:
        params["lora"] = init_lora(jax.random.key(1), params["params"], weights.rank, weights.targets)
    parts, seconds = [], []
    for n, g, p, r in ((1, 1, 16, 2), (4, 1, 16, 8), (4, 8, 16, 8), (4, 2, 64, 4), (16, 4, 32, 8), (2, 4, 128, 16)):
        launch = cx.Launch(0, 0, p, r, (cx.LaunchPart(g, n, n, (cx.LaunchRows(n, n, {p: 1.0}, {r: 1.0}, n),)),))
        w = costs.launch_work(launch, weights)
        parts.append([1.0, w.steps, n * g, w.prefill, w.decode])
        keys = jax.random.split(jax.random.key(2), (n, g))
        tokens, length, active = np.full((n, p), 65, np.int32), np.full((n,), p, np.int32), np.ones((n,), bool)
        once = lambda args=(params, tokens, length, keys, active), r=r: jax.block_until_ready(
            generate(policy, *args, max_new_tokens=r, stop_ids=(), pad_id=0, sampling=Sampling()).tokens
        )
        once()
        times = []
        for _ in range(repeats):
            clock = time.perf_counter()
            once()
            times.append(time.perf_counter() - clock)
        seconds.append(times)
    return costs.calibrate(parts, seconds)


# ---- the report -----------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- sweeps -->", "<!-- /sweeps -->"
COUNTED = ("sequences", "branch_sequences", "prompt_tokens", "completion_tokens", "env_calls", "launches")


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Exponent of y ~ x^a by least squares on logarithms, and the half-width of its 95 % interval (Student's t)."""
    from scipy.stats import linregress, t

    if len(x) < 3:
        return float("nan"), float("nan")
    fit = linregress(np.log(x), np.log(y))
    return float(fit.slope), float(t.ppf(0.975, len(x) - 2) * fit.stderr)


def agree(row: dict) -> bool:
    return all(row["predicted"][name] == row["counted"][name] for name in COUNTED)


def joined(rows: Sequence[dict]) -> list[dict]:
    """One row for each setting, with the repeats of all rounds; ``rounds`` has the shortest repeat of each round."""
    out: dict[tuple, dict] = {}
    names = [f.name for f in dataclasses.fields(Setting) if f.name != "round"]
    for row in rows:
        first = out.setdefault(tuple(row[n] for n in names), {**row, "seconds": [], "rounds": []})
        first["seconds"] = first["seconds"] + row["seconds"]
        first["rounds"] = [*first["rounds"], min(row["seconds"])]
    return list(out.values())


def report(f: flags.FlagValues) -> None:
    rows = read(Path(f.out))
    if not rows:
        raise ConfigError(
            f"--out: {f.out} holds no measurements; run `python -m experiments.studies.complexity run` first"
        )
    measured = [r for r in rows if "seconds" in r]
    ran = joined(measured)
    best = lambda r: min(r["seconds"])  # other programs only add time
    cal = [r for r in ran if r["sweep"] == "calibration"]
    again = min((len(r["rounds"]) for r in cal), default=0) > 2
    times = [r["rounds" if again else "seconds"] for r in cal]
    found = costs.calibrate([r["features"] for r in cal], times) if len(cal) >= 5 else None
    right = sum(agree(r) for r in measured)
    refused = len({key_of({**r, "round": 0}) for r in rows if "refused" in r})
    loads = [r["load"] for r in measured]
    lines = [
        f"Counts of {len(measured)} runs of {len(ran)} settings: {right} equal to the prediction in all of "
        f"{', '.join(COUNTED)}. {refused} settings were refused before they ran. Load of the machine "
        f"while measuring: {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores.",
    ]
    if found is not None:
        verdict = "stable" if found.stable else "**unstable**: the machine was busy"
        of = "rounds" if again else "repeats"
        lines.append(
            f"Calibration on {len(cal)} other settings: {of} spread by {found.spread:.0%}, "
            f"{verdict}. Seconds are those of the shortest repeat."
        )
    lines += ["", "| sweep | plan | runs | sequences ~ x^a | seconds ~ sequences^a | measured ÷ predicted seconds |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for sweep, x in (("k", "turns"), ("group", "group")):
        for plan in PLANS:
            mine = [r for r in ran if (r["sweep"], r["plan"]) == (sweep, plan)]
            if not mine:
                continue
            drawn = [float(r["predicted"]["sequences"]) for r in mine]
            a, da = slope([r[x] for r in mine], drawn)
            b, db = slope(drawn, [best(r) for r in mine])
            ratio = ""
            if found is not None:
                ratios = [best(r) / found.predict(r["features"]) for r in mine]
                ratio = f"{min(ratios):.2f} to {max(ratios):.2f}"
            reach = f"{mine[0][x]} to {mine[-1][x]}"
            lines.append(
                f"| {sweep} {reach} | {plan} | {len(mine)} | {a:.2f} ± {da:.2f} | {b:.2f} ± {db:.2f} | {ratio} |"
            )
    crowds = [r for r in ran if r["sweep"] == "agents"]
    if crowds:
        lines += ["", "| agents at once | parameters | programs compiled | ms a step | ms a step and agent |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for r in crowds:
            ms = 1000 * best(r)
            lines.append(f"| {r['agents']} | {r['share']} | {r['compiled']} | {ms:.1f} | {ms / r['agents']:.2f} |")
    doc = Path(f.doc)
    figure, link = figure_beside(doc)
    draw(ran, found, figure)
    lines += ["", f"![measured and predicted]({link})"]
    text = doc.read_text() if doc.exists() else f"# What sampling costs\n\n{BEGIN}\n{END}\n"
    doc.write_text(replace_section(text, BEGIN, END, "\n".join(lines)))
    print("\n".join(lines))


def draw(ran: list[dict], found: costs.Calibration | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    colours = dict(zip(PLANS, ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7")))
    for ax, (sweep, x) in zip(axes, (("k", "turns"), ("group", "group"))):
        for plan, colour in colours.items():
            mine = [r for r in ran if (r["sweep"], r["plan"]) == (sweep, plan)]
            if mine:
                at = [r[x] for r in mine]
                ax.plot(at, [min(r["seconds"]) for r in mine], "o", color=colour, label=plan)
                if found is not None:
                    ax.plot(at, [found.predict(r["features"]) for r in mine], "-", color=colour, lw=1)
        ax.set(
            xscale="log", yscale="log", xlabel="turns k" if x == "turns" else "samples G", ylabel="seconds a rollout"
        )
        ax.set_title("points: measured; lines: predicted", fontsize=9)
        if ax.has_data():
            ax.legend(fontsize=8)
    for share in ("shared", "lora", "separate"):
        mine = [r for r in ran if r["sweep"] == "agents" and r["share"] == share]
        if mine:
            ms = [1000 * min(r["seconds"]) / r["agents"] for r in mine]
            axes[2].plot([r["agents"] for r in mine], ms, "o-", label=share)
            axes[2].legend(fontsize=8)
    axes[2].set(xscale="log", yscale="log", xlabel="agents N, one program", ylabel="ms a step and agent")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=110)
    plt.close(fig)
