"""Joint and individual returns on 2x2 games, with several seeds in one compiled program:

    python -m experiments.studies.matrix_games [--game=chicken] [--seeds=8] [--steps=150] [--out=FILE.json]

Stage 0 teaches two tiny random models legal moves, each with probability one half. Then MAGRPO trains them, once on the
joint return (the social sum, a Dec-POMDP) and once on each model's own payoff. The command prints the social sum of
every seed at the end, a mean over the last 10 steps.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from absl import flags

from jaxmarl_llm.cli import config_flags

FLAGS = flags.FLAGS
flags.DEFINE_enum("game", "chicken", ["coordination", "chicken", "prisoners"], "Payoffs; see envs/matrix.py.")
flags.DEFINE_integer("seeds", 8, "Seeds 0 to N-1.", lower_bound=1)
flags.DEFINE_integer("steps", 150, "RL steps.", lower_bound=1)
flags.DEFINE_string("out", None, "Also write every curve to this JSON file.")


def get_config(game: str, rewards: str, steps: int):
    from jaxmarl_llm.agents.team import Backbone, TeamConfig
    from jaxmarl_llm.envs.registry import EnvConfig
    from jaxmarl_llm.recipes.magrpo import Config
    from jaxmarl_llm.training.config import SFT
    from jaxmarl_llm.training.optimizers import Optimizer

    tiny = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    return Config(
        steps=steps,
        batch=8,
        group=8,
        env=EnvConfig("matrix", {"game": game, "rewards": rewards}),
        team=TeamConfig(backbone=tiny, max_new_tokens=1, remat=False),
        reward={"payoff": 1.0},
        optimizer=Optimizer(learning_rate=3e-3, max_grad_norm=0.0),
        sft=SFT(steps=60, batch=32, samples=256, optimizer=Optimizer(learning_rate=1e-2)),
    )


def main(argv) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxmarl_llm.recipes import magrpo
    from jaxmarl_llm.runs.compiled import make_program

    out = {}
    for rewards in ("joint", "individual"):
        cfg = get_config(FLAGS.game, rewards, FLAGS.steps)
        cfg.check("config")
        run = jax.jit(jax.vmap(make_program(magrpo.make(cfg)).run))
        clock = time.time()
        compiled = run.lower(jnp.arange(FLAGS.seeds)).compile()
        built, clock = time.time() - clock, time.time()
        curves = np.asarray(jax.block_until_ready(compiled(jnp.arange(FLAGS.seeds)))[1]["social"])
        final = curves[:, -10:].mean(1)
        print(
            f"{FLAGS.game}, {rewards} returns: social sum {' '.join(f'{x:.2f}' for x in final)} "
            f"(median {np.median(final):.2f}; compiled in {built:.0f} s, ran in {time.time() - clock:.1f} s)",
            flush=True,
        )
        out[rewards] = curves.tolist()
    if FLAGS.out:
        Path(FLAGS.out).write_text(json.dumps(out))


if __name__ == "__main__":
    config_flags.run(lambda *_: main([]), required=())
