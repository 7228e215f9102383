"""Strategies: where replicas run, and what belongs to them."""
