"""Refusals by subject, and errors of JAX in the user's words."""
