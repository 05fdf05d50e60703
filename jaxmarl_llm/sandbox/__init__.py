"""Sandbox for generated programs: jails, system-call filters, and the process in which a program runs.

Tests run outside the jail. Only plain data crosses its border, and a verdict is an enumeration.
"""
