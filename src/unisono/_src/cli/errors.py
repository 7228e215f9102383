"""The error of a subcommand that cannot do its work."""

from __future__ import annotations


class CommandError(Exception):
    """An error that is shown as one message without a traceback."""


def check_counts(advice: str = "", **options: int | None) -> None:
    """Refuse options below 1. None stands for one that was left out; the advice follows the message."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be 1 or more; received {value}.{advice}")
