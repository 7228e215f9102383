"""Data and values of all replicas: what the doors to a step, fit and the loop, have in common."""
