"""What a process says to the others: agreements, its progress, the names of variables and exit codes."""
