"""A builder adds workers to a graph, one a turn, and the graph answers a query once: an array environment."""
