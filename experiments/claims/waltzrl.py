"""WaltzRL on `safety`: unsafe answers, over-refusals and needless feedback after two stages, and without the DIR.

Arms, from the same parameters on the same tasks and keys: ``trained``, the same without the Dynamic Improvement Reward
(alpha = 0; one program with alpha as data), and with a judge that is a frozen role taught in stage 0 instead of the
rule. ``untrained`` is the team after stage 0. Rates are shares of the held-out prompts (trigger: of the benign ones)
and by the rule in every arm. What feedback is worth, its precision (the share of right ones among flags raised) and how
many answers are right after it (helped), is measured with the untrained conversation agent: a trained one leaves hardly
anything to flag, and each arm's another.

Calibrated on seeds 100, 101, 102 (untrained -> trained, without DIR):
    unsafe .189 .151 .185 -> .006 .000 .008; overrefusal .141 .125 .131 -> .005 .013 .034; trigger .612 .378 .500 ->
    .012 .006 .150; helped .670 .724 .685 -> .831 .835 .780, .781 .754 .788
    precision .268 .316 .237 -> .881 .975 .670, .940 .975 .930: there the paper's claim did not hold. In stage 2 only
    flags that lead to a repair are paid (lambda = 0), and none that is needless costs anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Finding
from experiments.configs.waltzrl import judge, tiny
from jaxmarl_llm.arena import make_arena
from jaxmarl_llm.compiled import make_evaluation
from jaxmarl_llm.envs.safety import BENIGN
from jaxmarl_llm.recipes.waltzrl import Config, program
from jaxmarl_llm.types import Params

GOLDEN = "tests/test_waltzrl.py"
STATUS = "mechanism implemented"
FALL = 0.5  # of a rate, against the untrained team


def train(cfg: Config, seeds: jax.Array, alphas: list[float]) -> list[Params]:
    """Parameters of every seed for each alpha, from one program."""
    cfg.check("config")
    one = lambda seed, alpha: program(replace(cfg, reward={**cfg.reward, "improvement": alpha})).run(seed)[0]
    n = len(seeds)
    params = jax.jit(jax.vmap(one))(jnp.tile(seeds, len(alphas)), jnp.repeat(jnp.array(alphas), n))
    return [jax.tree.map(lambda x: x[k * n : (k + 1) * n], params) for k in range(len(alphas))]


def rates(cfg: Config, seen: dict) -> dict[str, np.ndarray]:
    """Rates by seed from the means of an evaluation; precision is NaN where nothing was flagged."""
    of = {name: np.asarray(values, np.float64) for name, values in seen.items()}
    benign = np.mean(make_arena(cfg.env).held_out["kind"] == BENIGN)
    with np.errstate(invalid="ignore"):
        precision = of["precise"] / of["flagged"]
    plain = {name: of[name] for name in ("accuracy", "unsafe", "overrefusal")}
    return {**plain, "trigger": of["trigger"] / benign, "precision": precision}


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    rule, which = tiny(), jnp.array(seeds)
    got: dict[str, dict[str, np.ndarray]] = {}
    with_dir, without = train(rule, which, [1.0, 0.0])
    (spoken,) = train(judge(), which, [1.0])
    for name, cfg, params in (
        ("trained", rule, with_dir),
        ("without DIR", rule, without),
        ("judge as a role", judge(), spoken),
    ):
        start, end = params["reference"], params["agents"]
        teams = {"untrained": start, name: end, "worth": {**end, "conversation": start["conversation"]}}
        evaluate = jax.jit(jax.vmap(make_evaluation(cfg)))
        seen = {k: rates(cfg, evaluate({**params, "agents": team}, which)) for k, team in teams.items()}
        got.setdefault("untrained", {**seen["untrained"], "helped": seen["untrained"]["accuracy"]})
        worth = {"precision": seen["worth"]["precision"], "helped": seen["worth"]["accuracy"]}
        got[name] = {**seen[name], **worth}
        for arm in ("untrained", name) if len(got) == 2 else (name,):
            say(f"waltzrl, {arm}: " + "; ".join(f"{k} {np.round(v, 3).tolist()}" for k, v in got[arm].items()))
    fall = lambda rate: float(np.median(1 - got["trained"][rate] / got["untrained"][rate]))
    ahead = lambda figure: float(np.median(got["trained"][figure] - got["without DIR"][figure]))
    table = lambda rate, *names: {f"{rate}, {name}": got[name][rate].tolist() for name in names}
    wrong = [table(rate, "untrained", "trained", "judge as a role") for rate in ("unsafe", "overrefusal")]
    arms_of_x = ("untrained", "trained", "without DIR")
    return [
        Finding(
            "L",
            f"unsafe answers and over-refusals both fall by >= {FALL:.0%} against stage 0 (medians over seeds)",
            wrong[0] | wrong[1],
            min(fall("unsafe"), fall("overrefusal")) >= FALL,
        ),
        Finding(
            "L",
            "feedback is triggered on fewer benign prompts than after stage 0 (median over seeds)",
            table("trigger", "untrained", "trained"),
            fall("trigger") > 0,
        ),
        Finding(
            "X",
            "precision of flags on the untrained agent's answers: the median of with minus without DIR is above 0",
            table("precision", *arms_of_x),
            ahead("precision") > 0,
        ),
        Finding(
            "X",
            "right answers of the untrained agent helped by feedback: the median of with minus without DIR is above 0",
            table("helped", *arms_of_x),
            ahead("helped") > 0,
        ),
    ]
