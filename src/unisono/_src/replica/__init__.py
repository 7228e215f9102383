"""The computation of one replica on its rows: pure functions of the model's state, traced once for each shape."""
