"""Creation of the small data files in the package, from larger public data sets.

Each file keeps its licence and its source beside it.
"""
