"""The configurations of `jaxmarl_llm.configs.dr_mas`, by their earlier path."""

from jaxmarl_llm.configs.dr_mas import *  # noqa: F403
