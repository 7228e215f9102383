"""Strategies: where the replicas run, and what belongs to them."""
