"""The first values of arrays, which stand in records for people to read: digests say which arrays differ, and these say how."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.typing import AnyArray

MOST_VALUES = 4


def list_first_values(array: AnyArray) -> list[float]:
    """Return the first numbers of an array, of keys of random numbers those of their data."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.real(np.ravel(np.asarray(array))[:MOST_VALUES]).astype(np.float64).tolist()


def format_values(values: Sequence[float]) -> str:
    """Return first values as one line, which says where there may be more.

    >>> format_values([0.1, 2.0])
    '0.1, 2'
    """
    return ", ".join(f"{value:.9g}" for value in values) + (" ..." if len(values) == MOST_VALUES else "")
