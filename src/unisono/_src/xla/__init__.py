"""Questions to JAX and XLA below the level of arrays: when JAX starts, how it compiles, with how many threads."""
