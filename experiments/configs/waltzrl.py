"""The configurations of `jaxmarl_llm.configs.waltzrl`, by their earlier path."""

from jaxmarl_llm.configs.waltzrl import *  # noqa: F403
