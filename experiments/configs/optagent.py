"""The configurations of `jaxmarl_llm.configs.optagent`, by their earlier path."""

from jaxmarl_llm.configs.optagent import *  # noqa: F403
