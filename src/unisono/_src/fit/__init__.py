"""`fit`, `evaluate` and `predict` of a model that was made in a scope, over the engine."""
