"""The configurations of `jaxmarl_llm.configs.grpo`, by their earlier path."""

from jaxmarl_llm.configs.grpo import *  # noqa: F403
