"""The shipped configurations by their earlier path: `--config=experiments/configs/NAME.py:variant`.

They live in `jaxmarl_llm.configs`, where `--config=NAME:variant` finds them in any folder.
"""
