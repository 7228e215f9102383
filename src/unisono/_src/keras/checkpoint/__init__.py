"""Checkpoints on disk. They are numbered, written as a whole, and checked before they are used."""
