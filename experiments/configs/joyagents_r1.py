"""The configurations of `jaxmarl_llm.configs.joyagents_r1`, by their earlier path."""

from jaxmarl_llm.configs.joyagents_r1 import *  # noqa: F403
