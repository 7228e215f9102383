"""The loop of the user's own: distributed data in, `run` and `reduce` over the engine behind fit."""
