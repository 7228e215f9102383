"""What a subcommand says to the user when it cannot do what it was asked for."""


class CommandError(Exception):
    """Shown as one message without a traceback."""
