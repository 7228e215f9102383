"""The loop of the user's own.

Distributed data go in, and `run` and `reduce` work over the engine behind fit.
"""
