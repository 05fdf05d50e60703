"""Train a recipe: python -m experiments.train --config=FILE.py[:variant] --workdir=DIR [--config.key=value ...]

Run the same command again to resume from the newest checkpoint in the workdir.
"""

import importlib
import os

from absl import flags, logging

from experiments import cli

flags.DEFINE_list("allow_config_change", [], "Config keys (a.b) that may differ from those the workdir was made with.")
flags.DEFINE_string("compilation_cache", None, "Folder of compiled programs; default: <workdir>/../.jax_cache.")


def main(cfg, workdir, flag_values):
    logging.set_verbosity(logging.WARNING)  # Orbax tells every detail at INFO
    import jax  # only now: a bad configuration ends before any device is touched

    cache = flag_values.compilation_cache or os.path.join(os.path.dirname(os.path.abspath(workdir)), ".jax_cache")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    from experiments import room
    from jaxmarl_llm.loop import fit
    from jaxmarl_llm.sharding import MeshConfig
    from jaxmarl_llm.workload import workload_of

    module = importlib.import_module(f"jaxmarl_llm.recipes.{cfg.recipe}")
    if jax.device_count() == 1 or cfg.mesh == MeshConfig(data=1):  # of a mesh experiments.aot tells what a chip holds
        plan, (work, _), memory = module.make_plan(cfg), workload_of(cfg), room.of_device()
        room.refuse(cfg, plan, work, *memory)
        if advice := room.micro_batch(cfg, plan, work, *memory):
            logging.warning(advice)
    recipe = module.make(cfg)
    try:
        fit(cfg, recipe, workdir, allow_config_change=flag_values.allow_config_change)
    finally:
        recipe.arena.close()


if __name__ == "__main__":
    cli.run(main)
