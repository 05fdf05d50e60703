"""Kernels, imported as ``jaxmarl_llm.kernels``. Each file has one operation, in forms that give the same numbers."""
