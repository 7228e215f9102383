"""The first values of arrays, for people who read records. Digests say which arrays differ, and these values say how."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.typing import AnyArray

MOST_VALUES = 4


def list_first_values(array: AnyArray) -> list[float]:
    """List the first numbers of an array. Of random keys it lists the first numbers of their data."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.real(np.ravel(np.asarray(array))[:MOST_VALUES]).astype(np.float64).tolist()


def format_values(values: Sequence[float]) -> str:
    """Format first values as one line. It shows where there may be more.

    >>> format_values([0.1, 2.0])
    '0.1, 2'
    """
    return ", ".join(f"{value:.9g}" for value in values) + (" ..." if len(values) == MOST_VALUES else "")
