"""Command that exports the models of a run as Hugging Face directories:

    jaxmarl-llm export --workdir=runs/smollm2 --export_to=exports/smollm2 [--models=master,math] [--adapters]

It writes one directory for each model, with adapters merged into their backbone, and team.json. That file gives the
model and the memory of each role. `transformers.AutoModelForCausalLM.from_pretrained` loads each directory. The
README.md of a directory is a model card: the training, and the results on held-out tasks.

--adapters writes the backbone once, as `base`, and each model as a folder that `peft` loads on it. vLLM serves all of
them from one process: `vllm serve base --enable-lora --lora-modules master=master math=math`.
"""

import logging as python_logging
from pathlib import Path

from absl import flags, logging

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli.evaluate import open_run

flags.DEFINE_string("export_to", None, "Folder to write; must not exist.")
flags.DEFINE_list("models", [], "Models to export; default: the models of all roles.")
flags.DEFINE_bool("adapters", False, "Write adapters as PEFT folders beside one backbone, instead of merging them.")


def main(cfg, workdir, flag_values):
    """Export models of the run in ``workdir``.

    cfg: not read; the configuration is that of the checkpoint. flag_values: the parsed flags. Raises ConfigError for an
    unknown model, and for a folder that exists.
    """
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    from jaxmarl_llm.agents import memory, team_file
    from jaxmarl_llm.errors import ConfigError
    from jaxmarl_llm.models import hf_weights, peft_files
    from jaxmarl_llm.models.lora import merge_lora
    from jaxmarl_llm.telemetry.metrics_file import read_metrics
    from jaxmarl_llm.telemetry.model_card import loading, model_card

    _, recipe, state = open_run(workdir, mesh=flag_values.mesh, best=flag_values.best)
    names = list(dict.fromkeys(role.model for role in recipe.team.roles))  # critics are not language models
    chosen = flag_values.models or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise ConfigError(f"--models: no model {unknown[0]!r}; the models are {', '.join(names)}")
    if flag_values.adapters and recipe.cfg.team.parameter_sharing != "lora":
        raise ConfigError(
            "--adapters: the run has none; expected one with config.team.parameter_sharing=lora, "
            f"got {recipe.cfg.team.parameter_sharing}"
        )
    out = Path(flag_values.export_to)
    if out.exists():
        raise ConfigError(f"--export_to: {out} exists; name a new folder")
    out.mkdir(parents=True)
    metrics = read_metrics(workdir) if (Path(workdir) / "metrics.jsonl").exists() else []

    def card(name):
        plays = [role.name for role in recipe.team.roles if role.model == name]
        how = loading(flag_values.adapters)
        (out / name / "README.md").write_text(model_card(name, plays, recipe.cfg, int(state.step), metrics, how))
        print(f"wrote {out / name}")

    for model in recipe.team.models:
        if model.name not in chosen:
            continue
        variables = model.variables(state.params)
        params = variables["params"]
        if flag_values.adapters:
            if not (out / "base").exists():
                hf_weights.save(out / "base", params, model.policy.config, model.tokenizer)
                print(f"wrote {out / 'base'}")
            peft_files.save(out / model.name, variables["lora"], model.policy.config, str((out / "base").resolve()))
            card(model.name)
            continue
        if "lora" in variables:
            params = merge_lora(params, variables["lora"], model.policy.config.lora_scale)
        hf_weights.save(out / model.name, params, model.policy.config, model.tokenizer)
        card(model.name)
    roles = {r.name: {"model": r.model, "max_new_tokens": r.max_new_tokens} for r in recipe.team.roles}
    entries = {
        name: memory.entries(store, recipe.team.model_of(recipe.team.role_index(name)).tokenizer.decode)
        for name, store in state.memory.items()
    }
    print(f"wrote {team_file.write(out, team_file.TeamFile(roles, entries, int(state.step)))}")


if __name__ == "__main__":
    config_flags.run(main, required=("workdir", "export_to"))
