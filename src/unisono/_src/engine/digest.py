"""Digests of arrays: two sums of words modulo 2^32. Each word is multiplied by a key of its place.

Sums of whole numbers may be added in any order. So the digest of an array is the sum of the digests of its parts, whatever the parts are and
whoever adds them up. The key of a place makes two words that change places seen. A word's halves have keys of their own, of 16 bits with a
sign, as the processors have an instruction for: no change of a single word leaves both sums as they are (`make_keys`).

An element narrower than 32 bits is one word, and a wider element is several words, the lowest first. `native/digest.h` has the same in C++.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from unisono._src.kernels.native.step_calls import call_digest_on_host
from unisono._src.typing import AnyArray, Array

LANES = 2
WORDS_OF_A_CHUNK = 1024
MASK = (1 << 64) - 1

NARROW = ("int2", "int4", "uint2", "uint4")
"""Dtypes of less than a byte. Their numbers are digested as bytes."""


@functools.cache
def make_keys() -> np.ndarray:
    """Make the keys (lane, place in a chunk, half of a word).

    They are odd whole numbers of 16 bits with a sign. The four keys of a place are drawn anew while their determinant is a multiple of
    2^16. With any other determinant, two words with the same two products are the same word.
    """
    keys = np.empty((LANES, WORDS_OF_A_CHUNK, 2), np.int16)
    state = 0
    for place in range(WORDS_OF_A_CHUNK):
        while True:
            state = (state + 0x9E3779B97F4A7C15) & MASK
            bits = mix_state(state) | 0x0001000100010001
            keys[:, place] = np.array([bits], np.uint64).view(np.int16).reshape(LANES, 2)
            (low, high), (other_low, other_high) = keys[:, place].tolist()
            if (low * other_high - high * other_low) % (1 << 16):
                break
    return keys


def mix_state(bits: int) -> int:
    """Mix a state as SplitMix64 does."""
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & MASK
    return bits ^ bits >> 31


def make_chunk_factors(chunks: int) -> np.ndarray:
    """Make the odd factor of each chunk's sum in each lane."""
    bits = 2 * np.arange(chunks, dtype=np.uint32)[:, None] + np.arange(LANES, dtype=np.uint32) + np.uint32(0x9E3779B9)
    bits = (bits ^ bits >> 16) * np.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> 13) * np.uint32(0xC2B2AE35)
    return (bits ^ bits >> 16) | np.uint32(1)


def digest_in_program(array: AnyArray) -> Array:
    """Compute the two sums of an array in a program of JAX."""
    low, high = split_words(jnp.asarray(array))
    chunks = -(-low.size // WORDS_OF_A_CHUNK)
    keys = make_keys().astype(np.int32)
    low, high = (
        jnp.pad(half, (0, chunks * WORDS_OF_A_CHUNK - half.size)).reshape(chunks, WORDS_OF_A_CHUNK) for half in (low, high)
    )
    factors = make_chunk_factors(chunks).view(np.int32)
    lanes = [
        ((low * keys[lane, :, 0] + high * keys[lane, :, 1]).sum(1, dtype=jnp.int32) * factors[:, lane]).sum(dtype=jnp.int32)
        for lane in range(LANES)
    ]
    return cast(Array, lax.bitcast_convert_type(jnp.stack(lanes), jnp.uint32))


def split_words(array: Array) -> tuple[Array, Array]:
    """Split an array's words into low and high halves. The halves are numbers with a sign."""
    array = array.ravel()
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], -1).ravel()
    if array.dtype == bool or array.dtype.name in NARROW:
        array = array.astype(jnp.int8)
    size = array.dtype.itemsize
    bits = cast(Array, lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))).ravel()
    if size < 4:
        low = bits.astype(jnp.int32)
        return (low if size == 1 else (low << 16) >> 16), jnp.zeros_like(low)
    words = cast(Array, lax.bitcast_convert_type(bits, jnp.int32))
    return (words << 16) >> 16, words >> 16


def digest_on_host(array: np.ndarray, first: int = 0) -> tuple[int, int]:
    """Compute the two sums of an array of NumPy. It may be a part of a larger array, whose words it has from `first` on."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return call_digest_on_host(flat, first) or digest_by_numpy(flat, first)


def digest_by_numpy(flat: np.ndarray, first: int) -> tuple[int, int]:
    """Compute the two sums without native kernels."""
    size = flat.dtype.itemsize
    halves = flat.view(np.int16).reshape(-1, 2) if size > 2 else np.zeros((flat.size, 2), np.int16)
    if size <= 2:
        halves[:, 0] = flat.view(np.uint8 if size == 1 else np.int16)
    places = first + np.arange(len(halves))
    chunks, places = np.divmod(places, WORDS_OF_A_CHUNK)
    factors = make_chunk_factors(int(chunks[-1]) + 1)[chunks] if len(halves) else np.zeros((0, LANES), np.uint32)
    products = (halves.astype(np.int64) * make_keys()[:, places].astype(np.int64)).sum(-1).astype(np.uint32)
    first_sum, second_sum = (int((products[lane] * factors[:, lane]).sum(dtype=np.uint32)) for lane in range(LANES))
    return first_sum, second_sum


def count_words(elements: int, itemsize: int) -> int:
    """Count the words of elements of this size in bytes."""
    return elements * (itemsize // 4) if itemsize > 4 else elements


class RowDigests:
    """The digests of parts of an array. The digest of the whole is the sum over parts that cover it."""

    def __init__(self) -> None:
        self.are_wanted = False
        self._digests: dict[range, tuple[int, int]] = {}

    def note(self, rows: range, written: np.ndarray) -> None:
        """Note rows that were written for a device. There is at least one."""
        self._digests[rows] = digest_part(rows, written)

    def total(self, count: int, read: Callable[[range], np.ndarray]) -> tuple[int, int]:
        """Digest all `count` rows. Rows that no device of this process got are read."""
        cover = choose_cover(self._digests, count)
        digests = [self._digests[part] if part in self._digests else digest_part(part, read(part)) for part in cover]
        first, second = (sum(lanes) % 2**32 for lanes in zip(*digests, strict=True))
        return first, second


def digest_part(rows: range, written: np.ndarray) -> tuple[int, int]:
    """Digest the range `rows` of an array. `written` holds exactly these rows."""
    return digest_on_host(written, count_words(rows.start * math.prod(written.shape[1:]), written.itemsize))


def choose_cover(parts: Iterable[range], count: int) -> list[range]:
    """Choose ranges that cover `range(count)` once.

    These are parts that do not overlap, and the gaps between them.

    >>> choose_cover([range(2, 4), range(0, 4), range(6, 7)], 8)
    [range(0, 4), range(4, 6), range(6, 7), range(7, 8)]
    """
    cover: list[range] = []
    end = 0
    for part in [*sorted(parts, key=lambda part: (part.start, -part.stop)), range(count, count)]:
        if part.start >= end:
            cover += [range(end, part.start), part]
            end = part.stop
    return [part for part in cover if part]
