"""Questions to JAX and XLA below the level of arrays.

When does JAX start, how does it compile, with how many threads?
"""
