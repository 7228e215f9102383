"""The examination of a machine by `unisono doctor`.

What Unisono runs on, what breaks the promise there, and a training on its placements.
"""
