"""Playing: plans of sampling, array rollouts as one program, host rollouts over text, and the runner of environments.

Both engines fold the same keys along the same paths and write the same tables.
"""
