"""A doctor questions a scripted patient within a budget of turns, and names a diagnosis: an array environment."""
