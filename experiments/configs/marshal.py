"""The configurations of `jaxmarl_llm.configs.marshal`, by their earlier path."""

from jaxmarl_llm.configs.marshal import *  # noqa: F403
