"""The configurations of `jaxmarl_llm.configs.comam`, by their earlier path."""

from jaxmarl_llm.configs.comam import *  # noqa: F403
