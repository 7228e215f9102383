"""Everything private in JAX that Unisono uses.

Nothing outside of this room names `jax._src`, jaxlib or `jax.interpreters`.

`versions.WINDOWS` says with which versions it was tried; a test says which name has gone from another version.
"""
