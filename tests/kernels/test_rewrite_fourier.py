"""Fourier transforms in pieces are those of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sizes import slow
from unisono._src.kernels.products import fourier
from unisono._src.kernels.rewriting import rewrite_function

TRANSFORMS = {
    "fft": jnp.fft.fft,
    "fft of a middle dimension": lambda x: jnp.fft.fft(x, axis=1),
    "fft2": jnp.fft.fft2,
    "ifftn": jnp.fft.ifftn,
    "rfft": jnp.fft.rfft,
    "rfft2": jnp.fft.rfft2,
    "irfft": lambda x: jnp.fft.irfft(x + 0j),
    "irfftn": lambda x: jnp.fft.irfftn(x + 0j),
    "irfft of an odd length": lambda x: jnp.fft.irfft(x + 0j, 2 * x.shape[-1] - 1),
    "gradient": jax.grad(lambda x: jnp.abs(jnp.fft.fft2(x)).sum()),
}


@pytest.mark.parametrize("shape", [*slow(((5, 13, 96),), ((64,) * 3,)), (1, 40, 5)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_pieces_are_transformed_as_the_whole(name, shape, rng, monkeypatch):
    monkeypatch.setattr(fourier, "MOST", 500)
    x = jnp.asarray(rng.standard_normal(shape), "float32")
    ours = jax.jit(rewrite_function(TRANSFORMS[name], "cpu"))(x)
    theirs = TRANSFORMS[name](x)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * np.abs(theirs).max())


def test_few_elements_are_left_to_one_thread():
    few = jax.make_jaxpr(rewrite_function(jnp.fft.fft2, "cpu"))(jnp.zeros((3, 100, 100)))
    many = jax.make_jaxpr(rewrite_function(jnp.fft.fft2, "cpu"))(jnp.zeros((4, 100, 100)))
    assert "scan" not in str(few)
    assert "scan" in str(many)
