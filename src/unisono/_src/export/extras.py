"""What formats need that is not installed with Unisono."""

from __future__ import annotations

import importlib.util


def check(module: str, extra: str, what: str) -> None:
    """Raises where a module is missing, with what to write.

    Args:
        module: Its name.
        extra: The extra of Unisono that installs it.
        what: What is done with it.
    """
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{what} needs {module}, which is not installed. Write pip install unisono[{extra}].")
