"""Strategies: the placement of the replicas, and the models and variables that belong to it."""
