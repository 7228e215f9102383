"""What a process says to the others. Agreements, its progress, the names of variables and exit codes."""
