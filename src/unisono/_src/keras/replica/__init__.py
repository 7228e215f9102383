"""The computation of one replica on its rows.

These are pure functions of the model's state, traced once for each shape.
"""
