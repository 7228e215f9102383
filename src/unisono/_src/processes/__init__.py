"""Processes: agreements, how they find one another, `unisono launch`, and the watch that names a lost one."""
