"""The packages that formats need and that are not installed with Unisono."""

from __future__ import annotations

import importlib.util


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise an error that says what to install, if a module is missing.

    Args:
        module: The name of the module.
        extra: The extra of Unisono that installs it.
        what: The thing that needs the module, for the error.
    """
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{what} needs {module}, which is not installed. Write pip install unisono[{extra}].")
