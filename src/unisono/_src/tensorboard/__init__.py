"""All that TensorBoard needs: the callback, the files of events, and what is drawn in them."""
