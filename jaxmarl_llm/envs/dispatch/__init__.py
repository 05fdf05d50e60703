"""A master routes a query to one of four specialists, as an array environment; and one agent alone, as a control.

The master, the chosen specialist and the master again act in turn, and all roles are paid when the last reply is the
gold answer.
"""
