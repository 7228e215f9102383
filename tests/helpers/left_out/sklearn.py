"""Not here: Keras imports it where it is, which is part of two fifths of the start of a process. See tests/helpers/processes.py."""

raise ImportError(f"{__name__} is left out of this process of a test")
