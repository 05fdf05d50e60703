"""A chooser takes the answer of one of two peers, has one made, or defers to an expert: an array environment."""
