"""Train a recipe: jaxmarl-llm train --config=NAME[:variant] --workdir=DIR [--config.key=value ...]

NAME is a shipped configuration, as `--list` prints them, or a file FILE.py. Such a file builds a configuration.

Run the same command again to resume from the newest checkpoint in the workdir. On several hosts the same command runs
on each host. Under Slurm, on a TPU slice and in a JobSet the processes find each other. Elsewhere each process gets:

    --coordinator=HOST:PORT --processes=4 --process=2     (HOST is that of process 0, PORT one that is free there)

On a CPU set JAX_PLATFORMS=cpu. The memory of a step that takes up to a third of the machine's memory is then kept for
the next step (jaxmarl_llm/runs/allocator.py).

A workdir has one writer, which its file run.lock names. --break_lock takes it from a run that has ended elsewhere.

Exit codes: 1: the run cannot go on; one line or a traceback says why. 2: the input is wrong. 75: nothing is wrong, run
the command again; the run was saved after SIGTERM, or another process has ended. 130: ended by Ctrl-C; the first one
saves the step in progress, a second one ends at once.
"""

import os

from absl import flags, logging

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.runs import allocator

flags.DEFINE_list("allow_config_change", [], "Config keys (a.b) that may differ from those the workdir was made with.")
flags.DEFINE_bool("break_lock", False, "Take the workdir from a run whose lock is there, though it has ended.")
flags.DEFINE_string("compilation_cache", None, "Folder of compiled programs; default: <workdir>/../.jax_cache.")
flags.DEFINE_string("coordinator", None, "host:port of process 0, where the processes of a run meet.")
flags.DEFINE_integer("processes", None, "How many processes; default: as the environment says, 1 where it is silent.")
flags.DEFINE_integer("process", None, "The number of this one, from 0.")
flags.DEFINE_float("init_timeout", 300.0, "Seconds that processes wait for each other at the start.", lower_bound=1.0)


def main(cfg, workdir, flag_values):
    """Train the recipe of ``cfg`` in the folder ``workdir``. ``flag_values``: the flags of this module."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells every detail at INFO
    import jax  # only now: a bad configuration ends before any device is touched
    import jaxlib

    from jaxmarl_llm import __version__
    from jaxmarl_llm.config import flatten
    from jaxmarl_llm.distributed import processes, rendezvous
    from jaxmarl_llm.errors import ConfigError

    where = rendezvous.find_cluster(
        flag_values.coordinator, flag_values.processes, flag_values.process, flag_values.init_timeout
    )
    versions = {"jaxmarl_llm": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    home = workdir if "://" in workdir else os.path.abspath(workdir)
    facts = {**versions, "--workdir": home, **flatten(cfg)}
    with processes.distributed_run(where, facts, flag_values.init_timeout):
        cache = flag_values.compilation_cache or os.path.join(os.path.dirname(home), ".jax_cache")
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        from jaxmarl_llm.runs import preflight
        from jaxmarl_llm.runs.loop import fit

        module = config_flags.recipe_module(cfg.recipe)
        for name in ("make_plan", "make"):
            if not callable(getattr(module, name, None)):
                raise ConfigError(f"config.recipe: {module.__name__} is no recipe: it defines no function {name}(cfg)")
        preflight.check(cfg, module.make_plan(cfg))
        recipe = module.make(cfg)
        try:
            changed, broken = flag_values.allow_config_change, flag_values.break_lock
            fit(cfg, recipe, workdir, allow_config_change=changed, break_lock=broken)
        finally:
            recipe.env_runner.close()


if __name__ == "__main__":
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        allocator.retain()
    config_flags.run(main)
