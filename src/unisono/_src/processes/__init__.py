"""Communication of a process with the others: agreements, its progress, the names of variables and exit codes."""
