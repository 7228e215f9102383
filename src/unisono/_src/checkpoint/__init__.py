"""State on disk: numbered checkpoints, written as a whole and checked before they are used."""
