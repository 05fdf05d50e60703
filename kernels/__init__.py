"""One operation a file: the mathematics, a jnp reference, a portable XLA form, Pallas (imported as jaxmarl_llm.kernels)."""
