"""Observers of a step: the comparison between processes, and the verification of devices."""
