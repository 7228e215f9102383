"""A step of R replicas, on any placement, with one order of additions. Nothing here knows of Keras."""
