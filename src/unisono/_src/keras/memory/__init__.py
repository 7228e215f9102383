"""The memory of a training, known before it begins."""
