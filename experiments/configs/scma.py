"""The configurations of `jaxmarl_llm.configs.scma`, by their earlier path."""

from jaxmarl_llm.configs.scma import *  # noqa: F403
