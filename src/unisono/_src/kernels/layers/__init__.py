"""Attention and normalizations, read back from equations before their gradient is taken."""
