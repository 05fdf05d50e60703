"""The configurations of `jaxmarl_llm.configs.mashost`, by their earlier path."""

from jaxmarl_llm.configs.mashost import *  # noqa: F403
