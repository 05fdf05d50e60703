"""Creation of the small data files in the package."""
