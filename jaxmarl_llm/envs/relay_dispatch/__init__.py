"""A master routes a query of 2 to 5 hops, as an array environment: each hop's specialist reads the last answer.

8 to 16 specialists of unequal reliability serve four kinds of operations. Accuracy is paid at the end alone.
"""
