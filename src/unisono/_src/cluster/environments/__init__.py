"""Sources of the description of a cluster, one in each file."""
