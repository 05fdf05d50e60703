"""Two meta-roles edit the graph of a debate between speakers of planted accuracy: an array environment."""
