"""Teams answer questions about a few facts that they search: an array environment with one module for each protocol."""
