"""What is asked of JAX and XLA below the level of arrays: when it starts, how it compiles, with how many threads."""
