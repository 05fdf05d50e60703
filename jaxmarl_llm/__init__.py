"""Multi-agent reinforcement learning of language-model teams, in JAX.

Import what you need from its module (``from jaxmarl_llm.rollout import ...``): this file imports nothing, so that
worker processes which only judge answers do not pay for JAX.
"""

from jaxmarl_llm._version import __version__

__all__ = ["__version__"]
