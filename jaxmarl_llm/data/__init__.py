"""Readers of data sets, and small samples with their licences that the package contains.

The readers also read larger folders of the same form.
"""
