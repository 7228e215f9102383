"""The environments in which a process finds what describes the others: a file for each, and `precedence` for their order."""
