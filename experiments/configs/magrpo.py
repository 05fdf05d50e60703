"""The configurations of `jaxmarl_llm.configs.magrpo`, by their earlier path."""

from jaxmarl_llm.configs.magrpo import *  # noqa: F403
