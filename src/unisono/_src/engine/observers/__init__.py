"""Observers of a step. They compare it between processes, or verify its devices."""
