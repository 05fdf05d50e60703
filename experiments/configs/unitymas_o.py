"""The configurations of `jaxmarl_llm.configs.unitymas_o`, by their earlier path."""

from jaxmarl_llm.configs.unitymas_o import *  # noqa: F403
