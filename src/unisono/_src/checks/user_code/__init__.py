"""What is read from the user's code, to refuse or warn of what would train something else in silence."""
