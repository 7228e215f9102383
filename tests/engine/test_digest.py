"""Digests of arrays: equal by NumPy, by JAX and by the kernel; sums of the digests of parts; and no change of one word hides."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizes import cases, mostly_slow
from unisono._src.engine import digest
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.step_calls import call_digest, call_digest_on_host

DTYPES = ("float32", "uint32", "int16", "float16", "bfloat16", "int8", "uint8", "bool", "complex64")
SIZES = (0, 1, 33, 1024, 5000)
BITS_64 = ("float64", "int64", "complex128")
has_kernels = load_kernels().level is not None


def draw_bytes(dtype: str, size: int, seed: int) -> np.ndarray:
    """Return an array of random bits: of numbers, infinities and NaNs."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(seed).integers(0, 256, size * kind.itemsize, "uint8")
    return (raw % 2 if dtype == "bool" else raw).view(kind)


@pytest.mark.parametrize(
    ("dtype", "size"),
    mostly_slow(
        itertools.product([*DTYPES, *BITS_64], SIZES),
        *((dtype, 5000) for dtype in (*DTYPES, *BITS_64)),
        *(("float32", size) for size in SIZES[:-1]),
        *(("int8", size) for size in (1, 33)),
    ),
)
def test_the_same_everywhere(dtype, size):
    array = draw_bytes(dtype, size, size)
    expected = digest.digest_by_numpy(array, 0)
    if dtype not in BITS_64:
        assert tuple(np.asarray(jax.jit(digest.digest_in_program)(array)).tolist()) == expected
    if has_kernels:
        assert call_digest_on_host(array, 0) == expected
    if has_kernels and dtype not in BITS_64:
        got = jax.jit(lambda array: call_digest([array, jnp.zeros(3)], [(1, 0, 3), (0, 0, size)]))(array)
        assert np.asarray(got).tolist() == [[0, 0], list(expected)]


@given(
    st.integers(0, 9),
    st.integers(1, 3000),
    st.lists(st.floats(0, 1), max_size=4),
    st.sampled_from(["float32", "float16", "float64"]),
)
def test_the_whole_is_the_sum_of_its_parts(seed, size, cuts, dtype):
    array = draw_bytes(dtype, size, seed)
    ends = sorted(int(cut * size) for cut in cuts)
    words = digest.count_words(1, array.itemsize)
    parts = [digest.digest_on_host(array[start:end], start * words) for start, end in zip([0, *ends], [*ends, size], strict=True)]
    assert tuple(sum(lanes) % 2**32 for lanes in zip(*parts, strict=True)) == digest.digest_on_host(array)
    by_numpy = [
        digest.digest_by_numpy(array[start:end], start * words) for start, end in zip([0, *ends], [*ends, size], strict=True)
    ]
    assert by_numpy == parts


@pytest.mark.skipif(not has_kernels, reason=str(load_kernels().reason))
@settings(max_examples=cases(12, 100))
@given(st.integers(0, 9), st.integers(0, 200_000), st.integers(0, 100_000))
def test_the_kernel_digests_parts(seed, first, size):
    """Of a large array, which threads digest in pieces."""
    array = draw_bytes("uint32", 300_000, seed)
    got = jax.jit(lambda array: call_digest([array], [(0, first, size), (0, 0, first)]))(array)
    assert np.asarray(got).tolist() == [
        list(digest.digest_by_numpy(part, 0)) for part in (array[first : first + size], array[:first])
    ]


def test_no_change_of_one_word_hides():
    """Two words with the same two products differ by a multiple of 2^17 in each half, which is none: the factors are odd, and their
    determinant is no multiple of 2^16."""
    keys = digest.make_keys().astype(np.int64)
    assert (keys % 2 == 1).all()
    assert ((keys[0, :, 0] * keys[1, :, 1] - keys[0, :, 1] * keys[1, :, 0]) % 2**16 != 0).all()
    assert (digest.make_chunk_factors(1000) % 2 == 1).all()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 5000))
def test_a_changed_word_is_seen(before, after, place):
    array = np.zeros(place + 1, "uint32")
    digests = set()
    for word in {before, after}:
        array[place] = word
        digests.add(digest.digest_on_host(array))
    assert len(digests) == len({before, after})


@given(st.integers(0, 9), st.integers(0, 4999), st.integers(0, 4999))
def test_words_that_change_places_and_signs_that_flip_are_seen(seed, one, other):
    array = np.random.default_rng(seed).standard_normal(5000).astype("float32")
    swapped, flipped = array.copy(), array.copy()
    swapped[[one, other]] = array[[other, one]]
    flipped[[one, other]] *= -1
    if one != other:
        assert digest.digest_on_host(swapped) != digest.digest_on_host(array)
        assert digest.digest_on_host(flipped) != digest.digest_on_host(array)


def test_zeros_at_the_end_are_seen_by_the_shape_alone():
    """The record of a variable has its shape."""
    assert digest.digest_on_host(np.zeros(5, "float32")) == digest.digest_on_host(np.zeros(7, "float32")) == (0, 0)
