"""Commands and files around a training. They read record files, and change nothing of the engine."""
