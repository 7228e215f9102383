"""Arrays on their way to disk: a copy that training cannot change, and a digest of each."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def copied(arrays: list[Any]) -> list[Any]:
    """On their device, when what computes them is done: nobody waits, and the originals may be donated to the next step."""
    return [jnp.copy(array) for array in arrays]


def digest(array: np.ndarray) -> str:
    found = hashlib.sha256(f"{array.shape} {array.dtype}\n".encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:32]
