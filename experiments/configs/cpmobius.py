"""The configurations of `jaxmarl_llm.configs.cpmobius`, by their earlier path."""

from jaxmarl_llm.configs.cpmobius import *  # noqa: F403
