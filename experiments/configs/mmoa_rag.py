"""The configurations of `jaxmarl_llm.configs.mmoa_rag`, by their earlier path."""

from jaxmarl_llm.configs.mmoa_rag import *  # noqa: F403
