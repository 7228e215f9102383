"""Data and values of all replicas, as fit and loops share them."""
