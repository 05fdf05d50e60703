"""The configurations of `jaxmarl_llm.configs.hila`, by their earlier path."""

from jaxmarl_llm.configs.hila import *  # noqa: F403
