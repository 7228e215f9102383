"""Fourier transforms whose bits do not depend on the number of threads.

XLA:CPU leaves them to a C library (DUCC), which deals the lines of a large array out to threads. A thread computes several of its lines at
once, and the remaining ones in another way, with other bits. DUCC computes an array of few elements on one thread. So a large array is
transformed some lines at a time, one dimension after another.
"""

from __future__ import annotations

import functools
import math

from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.lax import FftType

from unisono._src.programs.equations import Producers, Replacement
from unisono._src.programs.operands import get_shape

MOST = 32767
"""Elements that DUCC transforms on one thread."""


def replace_fourier_transform(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Replace a Fourier transform that DUCC would give to several threads."""
    lengths = eqn.params["fft_lengths"]
    if max(math.prod(get_shape(eqn.invars[0])), math.prod(get_shape(eqn.outvars[0]))) <= MOST:
        return None
    return Replacement(functools.partial(transform_dimensions, kind=FftType(eqn.params["fft_type"]), lengths=lengths), eqn.invars)


def transform_dimensions(x: Array, kind: FftType, lengths: tuple[int, ...]) -> Array:
    """Transform the last dimensions one after another.

    From real numbers the last one comes first, to real numbers it comes last.
    """
    first = x.ndim - len(lengths)
    others = FftType.IFFT if kind in (FftType.IFFT, FftType.IRFFT) else FftType.FFT
    steps = [(first + place, others, length) for place, length in enumerate(lengths[:-1])]
    steps.insert(len(steps) if kind == FftType.IRFFT else 0, (x.ndim - 1, kind, lengths[-1]))
    for axis, kind_of_step, length in steps:
        x = transform_axis(x, axis, kind_of_step, length)
    return x


def transform_axis(x: Array, axis: int, kind: FftType, length: int) -> Array:
    """Transform along one dimension."""
    order = (*(place for place in range(x.ndim) if place != axis), axis)
    x = lax.transpose(x, order)
    y = transform_lines(x.reshape(-1, x.shape[-1]), kind, length)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return lax.transpose(y, [order.index(place) for place in range(x.ndim)])


def transform_lines(x: Array, kind: FftType, length: int) -> Array:
    """Transform each line, as many at once as fit on one thread."""
    at_once = max(1, MOST // max(length, x.shape[1]))
    transform_some = functools.partial(lax.fft, fft_type=kind, fft_lengths=(length,))
    whole = len(x) // at_once * at_once
    parts = [lax.map(transform_some, x[:whole].reshape(-1, at_once, x.shape[1]))] if whole else []
    parts = [part.reshape(whole, -1) for part in parts]
    if whole < len(x):
        parts.append(transform_some(x[whole:]))
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
