"""Imported as ``jaxmarl_llm.kernels``. One operation a file: the mathematics, and forms that give the same numbers."""
