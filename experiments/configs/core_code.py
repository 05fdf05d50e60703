"""The configurations of `jaxmarl_llm.configs.core_code`, by their earlier path."""

from jaxmarl_llm.configs.core_code import *  # noqa: F403
