"""Two agents write summaries of a paper or the halves of its introduction, as text.

Both write at once, neither reads the other's text, and both are paid for how the two texts fit together.
"""
