"""A speaker reads an abstract and gives a hint, and a listener finds the title of that article among several.

The speaker sees no title, and the listener sees no abstract.
"""
