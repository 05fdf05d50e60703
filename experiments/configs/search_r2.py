"""The configurations of `jaxmarl_llm.configs.search_r2`, by their earlier path."""

from jaxmarl_llm.configs.search_r2 import *  # noqa: F403
