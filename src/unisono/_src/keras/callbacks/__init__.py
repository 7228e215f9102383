"""Callbacks of `fit` that save and restore a training."""
