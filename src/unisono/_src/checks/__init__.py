"""Refusals by subject, and the errors of JAX in the words of the user."""
