"""The record of a run: digests of its steps in a file that only grows."""
