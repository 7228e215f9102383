"""The versions of Keras that this room was checked with."""

from __future__ import annotations

import keras

CHECKED = ("3.15.0", "3.15.1")


def check_version() -> None:
    """Refuse versions of Keras that this room was not checked with."""
    if keras.__version__ not in CHECKED:
        raise ImportError(
            f"Unisono drives parts of Keras that are private, and was checked with keras {' and '.join(CHECKED)}; "
            f"this is keras {keras.__version__}. Install keras=={CHECKED[-1]}."
        )
