"""Private parts of JAX, each in a file that says with which versions it was checked."""
