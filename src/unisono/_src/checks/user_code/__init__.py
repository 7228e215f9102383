"""Checks that read the user's code, and refuse or warn of what would silently train something else."""
