"""What is private in JAX, each in a file that says with which versions it was checked."""
