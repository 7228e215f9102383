"""The examination of a machine: what Unisono runs on, what breaks the promise there, and a training on its placements."""
