"""The commands of `jaxmarl-llm`: train, evaluate, export and the reading of configuration flags.

Whatever is wrong with the input ends with one line and exit code 2.
"""
