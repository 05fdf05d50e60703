"""Teams write programs of a small stack language that do what examples show: an array environment.

A planner says which operations a program needs, and a coder writes the program. Hidden examples test it.
"""
