"""Teams write programs that do what examples show: of a small stack language, and in Python as a text form.

A planner says what a program needs, a coder writes it, and a reflector may give hints. Hidden examples test it.
"""
