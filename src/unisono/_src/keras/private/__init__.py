"""Everything private in Keras that Unisono uses.

Nothing outside of this room touches an underscored name of Keras.

`versions.WINDOWS` says with which versions it was tried, on the JAX backend; others are refused by name.
"""
