"""The configurations of `jaxmarl_llm.configs.prisma`, by their earlier path."""

from jaxmarl_llm.configs.prisma import *  # noqa: F403
