"""Teams work out the sum of a few small numbers, as an array environment and as text.

The roles of a protocol (solver, verifier, refiner, meta-thinker, reasoner) act one after the other. All of them are
paid when the last answer is right.
"""
