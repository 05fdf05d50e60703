"""The configurations of `jaxmarl_llm.configs.doctor_agent`, by their earlier path."""

from jaxmarl_llm.configs.doctor_agent import *  # noqa: F403
