"""The environments that tell a process of the others. Each has a file; `precedence` has their order."""
