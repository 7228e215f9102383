"""State on disk: numbered checkpoints, written by Orbax and checked before they are used."""
