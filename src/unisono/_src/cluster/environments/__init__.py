"""Where the description of a cluster comes from: one file a place."""
