"""What one replica computes from its rows: pure functions of the model's state, traced once for each shape."""
