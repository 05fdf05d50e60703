"""Devices and processes: meshes, sharding rules, the connections between processes, and deadlines.

Without a mesh, every function here returns its argument unchanged.
"""
