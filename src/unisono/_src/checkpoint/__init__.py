"""State on disk: numbered checkpoints over Orbax, found good before they are used."""
