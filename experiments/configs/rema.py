"""The configurations of `jaxmarl_llm.configs.rema`, by their earlier path."""

from jaxmarl_llm.configs.rema import *  # noqa: F403
