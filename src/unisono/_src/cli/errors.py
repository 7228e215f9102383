"""The error of a subcommand that cannot do what it was asked for."""


class CommandError(Exception):
    """An error that is shown as one message without a traceback."""
