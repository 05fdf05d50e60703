"""Language models as pure functions: the decoder, adapters, value heads, tokenizers, and weights of Hugging Face.

A tabular policy stands beside the decoder, for exact tests.
"""
