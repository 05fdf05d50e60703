"""Two writers each write a string on one topic, as an array environment.

A concise and a detailed writer act at once or one after the other, and both are paid for how the two strings fit
together.
"""
