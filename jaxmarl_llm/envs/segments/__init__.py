"""A reasoner writes the steps of a sum, a segmenter parts the text, a scorer weighs the parts: an array environment."""
