"""`fit`, `evaluate` and `predict` of a model, over the engine.

The model was made in a strategy's scope.
"""
