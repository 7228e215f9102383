"""The version of Unisono, and of the libraries on which the bits depend."""

from __future__ import annotations

VERSION = "0.1.0"


def list_versions() -> dict[str, str]:
    """Return the versions, by the names of the packages."""
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
