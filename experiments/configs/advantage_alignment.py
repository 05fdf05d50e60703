"""The configurations of `jaxmarl_llm.configs.advantage_alignment`, by their earlier path."""

from jaxmarl_llm.configs.advantage_alignment import *  # noqa: F403
