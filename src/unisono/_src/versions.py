"""Which Unisono this is, and beside which of the libraries that decide about bits."""

from __future__ import annotations

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """By name."""
    import jax
    import jaxlib.version
    import keras
    import numpy as np

    return {
        "unisono": VERSION,
        "keras": keras.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
    }
