"""Command that exports the models of a run as Hugging Face directories:

    jaxmarl-llm export --workdir=runs/smollm2 --export_to=exports/smollm2 [--models=master,math]

It writes one directory for each model, with adapters merged into their backbone, and team.json. That file gives the
model and the memory of each role. `transformers.AutoModelForCausalLM.from_pretrained` loads each directory.
"""

import logging as python_logging
from pathlib import Path

from absl import flags, logging

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli.evaluate import open_run

flags.DEFINE_string("export_to", None, "Folder to write; must not exist.")
flags.DEFINE_list("models", [], "Models to export; default: the models of all roles.")


def main(cfg, workdir, flag_values):
    """Export models of the run in ``workdir``.

    cfg: not read; the configuration is that of the checkpoint. flag_values: the parsed flags. Raises ConfigError for an
    unknown model, and for a folder that exists.
    """
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    from jaxmarl_llm.agents import memory, team_file
    from jaxmarl_llm.errors import ConfigError
    from jaxmarl_llm.models import hf_weights
    from jaxmarl_llm.models.lora import merge_lora

    _, recipe, state = open_run(workdir, mesh=flag_values.mesh, best=flag_values.best)
    names = list(dict.fromkeys(role.model for role in recipe.team.roles))  # critics are not language models
    chosen = flag_values.models or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise ConfigError(f"--models: no model {unknown[0]!r}; the models are {', '.join(names)}")
    out = Path(flag_values.export_to)
    if out.exists():
        raise ConfigError(f"--export_to: {out} exists; name a new folder")
    out.mkdir(parents=True)
    for model in recipe.team.models:
        if model.name not in chosen:
            continue
        variables = model.variables(state.params)
        params = variables["params"]
        if "lora" in variables:
            params = merge_lora(params, variables["lora"], model.policy.config.lora_scale)
        hf_weights.save(out / model.name, params, model.policy.config, model.tokenizer)
        print(f"wrote {out / model.name}")
    roles = {r.name: {"model": r.model, "max_new_tokens": r.max_new_tokens} for r in recipe.team.roles}
    entries = {
        name: memory.entries(store, recipe.team.model_of(recipe.team.role_index(name)).tokenizer.decode)
        for name, store in state.memory.items()
    }
    print(f"wrote {team_file.write(out, team_file.TeamFile(roles, entries, int(state.step)))}")


if __name__ == "__main__":
    config_flags.run(main, required=("workdir", "export_to"))
