"""The configurations of `jaxmarl_llm.configs.afm`, by their earlier path."""

from jaxmarl_llm.configs.afm import *  # noqa: F403
