"""The TensorBoard callback, its event files, and the summaries in them."""
