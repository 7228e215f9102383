"""Arrays on their way to disk: copies that training cannot change, and their digests."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.typing import AnyArray, Array


@jax.jit
def copy_on_device(arrays: list[AnyArray]) -> list[Array]:
    """Copy arrays on their device, once they are computed: no thread waits, and the next step may be donated the originals."""
    return [jnp.copy(array) for array in arrays]


def digest_array(array: np.ndarray) -> str:
    digester = hashlib.sha256(f"{array.shape} {array.dtype}\n".encode())
    digester.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digester.hexdigest()[:32]
