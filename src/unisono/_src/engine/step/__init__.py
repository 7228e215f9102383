"""One training, evaluation or prediction step of R replicas on a placement."""
