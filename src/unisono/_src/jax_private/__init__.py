"""Everything private in JAX that Unisono uses: nothing outside of this room names `jax._src`, jaxlib or `jax.interpreters`.

Checked with jax and jaxlib 0.10.2; a test says which name has gone from another version.
"""
