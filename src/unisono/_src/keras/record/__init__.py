"""The record of a run: digests of its steps in one file. The file only grows."""
