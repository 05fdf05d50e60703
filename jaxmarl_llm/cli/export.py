"""Export a run's models as Hugging Face directories:

    python -m experiments.export --workdir=runs/smollm2 --export_to=exports/smollm2 [--models=master,math]

One directory a model (adapters merged into their backbone), and team.json: which role is played by which model, with
its memory. `transformers.AutoModelForCausalLM.from_pretrained` loads each.
"""

import json
import logging as python_logging
from pathlib import Path

from absl import flags, logging

from experiments import cli
from experiments.evaluate import open_run

flags.DEFINE_string("export_to", None, "Folder to write; must not exist.")
flags.DEFINE_list("models", [], "Models to export; default: all that play a role.")


def main(cfg, workdir, flag_values):
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    from jaxmarl_llm import memory, weights
    from jaxmarl_llm.lora import merge_lora
    from jaxmarl_llm.text import ConfigError

    _, recipe, state = open_run(workdir, mesh=flag_values.mesh)
    names = list(dict.fromkeys(role.model for role in recipe.team.roles))  # critics are no language models
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
        weights.save(out / model.name, params, model.policy.config, model.tokenizer)
        print(f"wrote {out / model.name}")
    team = {
        "roles": {r.name: {"model": r.model, "max_new": r.max_new} for r in recipe.team.roles},
        "memory": {name: memory.entries(store) for name, store in state.memory.items()},
        "step": int(state.step),
    }
    (out / "team.json").write_text(json.dumps(team, indent=1, ensure_ascii=False))
    print(f"wrote {out / 'team.json'}")


if __name__ == "__main__":
    cli.run(main, required=("workdir", "export_to"))
