"""Keras' models on the engine: strategies, `fit`, loops, sources of data, checkpoints."""
