"""Command that exports the models of a run as Hugging Face directories:

    jaxmarl-llm export runs/smollm2 --export_to=exports/smollm2 [--models=master,math] [--adapters]
        [--push=OWNER/NAME] [--private]

It writes one directory for each model, with adapters merged into their backbone, and team.json. That file gives the
model and the memory of each role. `transformers.AutoModelForCausalLM.from_pretrained` loads each directory. The
README.md of a directory is a model card: the training, and the results on held-out tasks.

--adapters writes the backbone once, as `base`, and each model as a folder that `peft` loads on it. vLLM serves all of
them from one process: `vllm serve base --enable-lora --lora-modules master=master math=math`. An adapter names its
backbone as ../base, so the whole export may be moved.

--push uploads each folder to the Hugging Face hub as the model OWNER/NAME-FOLDER, and team.json to OWNER/NAME.
"""

import logging as python_logging
from pathlib import Path

from absl import flags, logging

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli.trained_run import open_run

flags.DEFINE_string("export_to", None, "Folder to write; must not exist.")
flags.DEFINE_list("models", [], "Models to export; default: the models of all roles.")
flags.DEFINE_bool("adapters", False, "Write adapters as PEFT folders beside one backbone, instead of merging them.")
flags.DEFINE_string(
    "push", None, "Upload to the Hugging Face hub: the team to OWNER/NAME, each folder to OWNER/NAME-FOLDER."
)
flags.DEFINE_bool("private", False, "Repositories that --push creates can be read by their owner alone.")

BASE = "../base"  # the backbone as seen from the folder of an adapter: an export may be moved
TEAM_FILES = ("README.md", "team.json")  # of the export itself, and of no model


def main(cfg, workdir, flag_values):
    """Export models of the run in ``workdir``.

    cfg: not read; the configuration is that of the checkpoint. flag_values: the parsed flags. Raises ConfigError for an
    unknown model, for a folder that exists, and where the hub refuses.
    """
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    from jaxmarl_llm.errors import ConfigError
    from jaxmarl_llm.models import hub

    _, recipe, state = open_run(workdir, mesh=flag_values.mesh, best=flag_values.best)
    names = list(dict.fromkeys(role.model for role in recipe.team.roles))  # critics are not language models
    chosen = flag_values.models or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise ConfigError(f"--models: no model {unknown[0]!r}; the models are {', '.join(names)}")
    adapters, push = flag_values.adapters, flag_values.push
    if adapters and recipe.cfg.team.parameter_sharing != "lora":
        raise ConfigError(
            "--adapters: the run has none; expected one with config.team.parameter_sharing=lora, "
            f"got {recipe.cfg.team.parameter_sharing}"
        )
    out = Path(flag_values.export_to)
    if out.exists():
        raise ConfigError(f"--export_to: {out} exists; name a new folder")
    pushing = push is not None
    pushed = {name: f"{push}-{name}" for name in [*chosen, *["base"] * adapters]} if pushing else {}
    if pushing:  # before anything is written, because most uploads fail for want of a login
        hub.reserve([push, *pushed.values()], "--push", private=flag_values.private)
    out.mkdir(parents=True)
    write_models(out, recipe, state, chosen, workdir, adapters=adapters, pushed=pushed)
    write_team(out, recipe, state, pushed or {name: name for name in chosen})
    for name, repository in pushed.items():
        print(f"pushed {hub.upload(out / name, repository, '--push')}")
    if pushing:
        print(f"pushed {hub.upload(out, push, '--push', only=TEAM_FILES)}")


def write_models(out, recipe, state, chosen, workdir, *, adapters, pushed):
    """Write one folder for each model, and with adapters one for their backbone.

    out: folder of the export, which exists. recipe, state: the run. chosen: names of the models. workdir: folder of the
    run, whose metrics the model cards show. adapters: whether to write adapters alone. pushed: hub name of each model
    and of ``base``; empty without an upload.
    """
    from jaxmarl_llm.models import hf_weights, peft_files
    from jaxmarl_llm.models.lora import merge_lora
    from jaxmarl_llm.telemetry.metrics_file import read_metrics
    from jaxmarl_llm.telemetry.model_card import loading, model_card

    metrics = read_metrics(workdir) if (Path(workdir) / "metrics.jsonl").exists() else []
    base = out / "base"
    for model in recipe.team.models:
        if model.name not in chosen:
            continue
        variables, config, folder = model.variables(state.params), model.policy.config, out / model.name
        params = variables["params"]
        if adapters:
            if not base.exists():
                hf_weights.save(base, params, config, model.tokenizer)
                print(f"wrote {base}")
            peft_files.save(folder, variables["lora"], config, pushed.get("base", BASE))
        else:
            if "lora" in variables:
                params = merge_lora(params, variables["lora"], config.lora_scale)
            hf_weights.save(folder, params, config, model.tokenizer)
        plays = [role.name for role in recipe.team.roles if role.model == model.name]
        how = loading(adapters, pushed.get(model.name, "."), pushed.get("base", BASE))
        (folder / "README.md").write_text(model_card(model.name, plays, recipe.cfg, int(state.step), metrics, how))
        print(f"wrote {folder}")


def write_team(out, recipe, state, places):
    """Write team.json, and README.md that says which model plays which role.

    out: folder of the export. recipe, state: the run. places: folder or hub name of each exported model.
    """
    from jaxmarl_llm.agents import memory, team_file
    from jaxmarl_llm.telemetry.model_card import team_card

    roles = {r.name: {"model": r.model, "max_new_tokens": r.max_new_tokens} for r in recipe.team.roles}
    entries = {
        name: memory.entries(store, recipe.team.model_of(recipe.team.role_index(name)).tokenizer.decode)
        for name, store in state.memory.items()
    }
    (out / "README.md").write_text(team_card(places, roles, recipe.cfg))
    print(f"wrote {team_file.write(out, team_file.TeamFile(roles, entries, int(state.step)))}")


if __name__ == "__main__":
    config_flags.run(main, required=("workdir", "export_to"), takes_config=False)
