"""Teams answer questions from what they search: an array environment, one module for each protocol, and a text form.

The text form has real questions and passages.
"""
