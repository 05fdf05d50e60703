"""What `experiments.study` writes of its records: one table, one figure."""
