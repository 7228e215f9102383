"""A training in several processes. How a process finds the others, `unisono launch`, and the watch that names a lost process."""
