"""Everything private in Keras that Unisono uses: nothing outside of this room touches an underscored name of Keras.

It was checked with Keras 3.15.0 and 3.15.1 on the JAX backend; a strategy refuses others by name.
"""
