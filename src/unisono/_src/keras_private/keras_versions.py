"""The versions of Keras that this room was checked with."""

from __future__ import annotations

import keras

CHECKED_VERSIONS = ("3.15.0", "3.15.1")


def check_keras_version() -> None:
    """Refuse versions of Keras that this room was not checked with."""
    if keras.__version__ not in CHECKED_VERSIONS:
        raise ImportError(
            f"Unisono drives parts of Keras that are private, and was checked with keras {' and '.join(CHECKED_VERSIONS)}; "
            f"this is keras {keras.__version__}. Install keras=={CHECKED_VERSIONS[-1]}."
        )
