"""Train a recipe: `python -m experiments.train` is `jaxmarl-llm train`, see jaxmarl_llm/cli/train.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxmarl_llm.cli.train", run_name="__main__")
