"""Global batches: reading them, the order of their rows, and the replica of each row."""
