"""Fourier transforms whose bits do not depend on the number of threads.

XLA:CPU leaves them to a C library (DUCC), which deals the lines of a large array out to threads. A thread takes several of its lines at
once, and those that remain in another way, with other bits. An array of few elements it gives to one thread. So a large array is
transformed some lines at a time, one dimension after another.
"""

from __future__ import annotations

import functools
import math

from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.lax import FftType

from unisono._src.xla.rewrite.equations import MadeBy, Replacement, shape

MOST = 32767
"""Elements of which DUCC makes one thread's work."""


def rule(eqn: JaxprEqn, _: MadeBy) -> Replacement | None:
    lengths = eqn.params["fft_lengths"]
    if max(math.prod(shape(eqn.invars[0])), math.prod(shape(eqn.outvars[0]))) <= MOST:
        return None
    return Replacement(functools.partial(transformed, kind=FftType(eqn.params["fft_type"]), lengths=lengths), eqn.invars)


def transformed(x: Array, kind: FftType, lengths: tuple[int, ...]) -> Array:
    """Return the transform over the last dimensions, one after another: of real numbers the last one first, to real numbers last."""
    first = x.ndim - len(lengths)
    others = FftType.IFFT if kind in (FftType.IFFT, FftType.IRFFT) else FftType.FFT
    steps = [(first + place, others, length) for place, length in enumerate(lengths[:-1])]
    steps.insert(len(steps) if kind == FftType.IRFFT else 0, (x.ndim - 1, kind, lengths[-1]))
    for axis, kind_of_step, length in steps:
        x = over_axis(x, axis, kind_of_step, length)
    return x


def over_axis(x: Array, axis: int, kind: FftType, length: int) -> Array:
    """Return the transform over one dimension."""
    order = (*(place for place in range(x.ndim) if place != axis), axis)
    x = lax.transpose(x, order)
    y = of_lines(x.reshape(-1, x.shape[-1]), kind, length)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return lax.transpose(y, [order.index(place) for place in range(x.ndim)])


def of_lines(x: Array, kind: FftType, length: int) -> Array:
    """Return the transform of each line, of so many lines at a time as one thread takes."""
    few = max(1, MOST // max(length, x.shape[1]))
    transform = functools.partial(lax.fft, fft_type=kind, fft_lengths=(length,))
    whole = len(x) // few * few
    parts = [lax.map(transform, x[:whole].reshape(-1, few, x.shape[1]))] if whole else []
    parts = [part.reshape(whole, -1) for part in parts]
    if whole < len(x):
        parts.append(transform(x[whole:]))
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
