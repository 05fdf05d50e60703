"""Plans for TPU pods on any machine: programs compiled ahead of time, and a report of their memory and time.

No TPU is needed, because the compiler alone knows the shapes of a topology.
"""
