"""Global batches: how they are read, ordered and cut into shards."""
