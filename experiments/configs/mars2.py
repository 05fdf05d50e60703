"""The configurations of `jaxmarl_llm.configs.mars2`, by their earlier path."""

from jaxmarl_llm.configs.mars2 import *  # noqa: F403
