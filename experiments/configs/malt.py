"""The configurations of `jaxmarl_llm.configs.malt`, by their earlier path."""

from jaxmarl_llm.configs.malt import *  # noqa: F403
