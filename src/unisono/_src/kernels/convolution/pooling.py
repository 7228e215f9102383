"""Poolings as elementwise expressions of strided slices.

There is one slice for each of a window's positions (its "taps").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax import Array, lax
from jax.extend.core import JaxprEqn, Literal, Primitive

from unisono._src.kernels.products.arrays import (
    has_place_in_memory,
    keep_in_memory,
    multiply_pairwise,
    pad_array,
    put_in_memory,
    slice_with_steps,
)
from unisono._src.programs.equations import Producers, Replacement
from unisono._src.programs.operands import Atom, get_dtype, get_shape
from unisono._src.typing import Shape

MOST_TAPS = 64
"""They are unrolled."""

MOST_CHOICES = 49
"""Elements of a window; over more of them, XLA's own gradient of the maximum is as fast."""

FOLDS: dict[str, tuple[Callable[[Array, Array], Array], float]] = {
    "reduce_window_max": (lax.max, -math.inf),
    "reduce_window_min": (lax.min, math.inf),
    "reduce_window_sum": (lax.add, 0),
}


class Pool(NamedTuple):
    """Windows of `size` at every multiple of `strides`."""

    size: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def has_overlap(self) -> bool:
        """Whether windows share elements."""
        return any(size > stride for size, stride in zip(self.size, self.strides, strict=True))

    def number(self, tap: Sequence[int | Array]) -> int | Array:
        """Number a tap, with different numbers for different taps.

        This holds also for taps beyond the window's end, which `sum_over_windows` needs.
        """
        numbers = zip(tap, self.size, self.strides, strict=True)
        return functools.reduce(lambda total, axis: total * (-(-axis[1] // axis[2]) * axis[2]) + axis[0], numbers, 0)


def replace_pooling(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace a pooling, or a window sum's gradient, by elementwise expressions."""
    params = eqn.params
    (x,) = eqn.invars
    results = get_shape(eqn.outvars[0])
    pool = Pool(params["window_dimensions"], params["window_strides"])
    padding = params["padding"]
    if math.prod(pool.size) > MOST_TAPS or any(distance != 1 for distance in params["base_dilation"] + params["window_dilation"]):
        return None
    if eqn.primitive.name == "reduce_window_sum" and set(pool.strides) == {1} and not any(map(any, padding)):
        gradient = replace_sum_gradient(pool.size, made_by.find(x), results)
        if gradient:
            return gradient
    fold, identity = FOLDS[eqn.primitive.name]
    is_cheap = is_biased_convolution(x, made_by)

    def pooling(x: Array) -> Array:
        return functools.reduce(fold, slice_taps(x, results, identity, pool, padding, is_cheap))

    return Replacement(pooling, [x])


def replace_flattening(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Store a pooling before it is flattened, as for a dense layer.

    XLA:CPU would compute the pooling in the loop over the flat rows, divide the number of each element by the sizes of the pooling, and take
    five times as long.
    """
    (x,) = eqn.invars
    maker = made_by.find(x)
    is_flattened = len(get_shape(eqn.outvars[0])) < len(get_shape(x))
    if maker is None or maker.primitive.name not in FOLDS or not is_flattened or not has_place_in_memory(get_dtype(x)):
        return None
    return Replacement(lambda x: eqn.primitive.bind(put_in_memory(x), **eqn.params), [x])


def replace_max_gradient(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace the gradient of a max or min over small windows."""
    params = eqn.params
    pool = Pool(params["window_dimensions"], params["window_strides"])
    if math.prod(pool.size) > MOST_CHOICES:
        return None
    is_cheap = is_biased_convolution(eqn.invars[1], made_by)

    def pooling_gradient(dy: Array, x: Array) -> Array:
        return compute_max_gradient(dy, x, pool, params["padding"], params["select_prim"], is_cheap)

    return Replacement(pooling_gradient, eqn.invars)


def replace_max_gradient_without_overlap(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    pool = Pool(eqn.params["window_dimensions"], eqn.params["window_strides"])
    return None if pool.has_overlap else replace_max_gradient(eqn, made_by)


def slice_taps(
    x: Array, results: Sequence[int], identity: float, pool: Pool, padding: Sequence[tuple[int, int]], is_cheap: bool
) -> list[Array]:
    """Slice, for each tap of a window, its elements in all windows.

    Args:
        is_cheap: Whether each reader may compute x again, if no element is read twice.
    """
    if not is_cheap or pool.has_overlap or any(map(any, padding)):
        x = keep_in_memory(pad_array(x, identity, [(low, high, 0) for low, high in padding]))
    return [slice_with_steps(x, tap, results, pool.strides) for tap in itertools.product(*map(range, pool.size))]


def is_biased_convolution(x: Atom, made_by: Producers) -> bool:
    """Whether at most two simple steps lead from a convolution to x. Such steps are a bias and a ReLU.

    Normalization has more steps: to compute it again takes longer than to read it again.
    """
    for _ in range(2):
        maker = made_by.find(x)
        if maker is None or maker.primitive.name not in ("add", "max", "jit", "custom_jvp_call"):
            break
        x = next((operand for operand in maker.invars if get_shape(operand) == get_shape(x)), x)
    return (maker := made_by.find(x)) is not None and maker.primitive.name == "conv_general_dilated"


def compute_max_gradient(
    dy: Array, x: Array, pool: Pool, padding: Sequence[tuple[int, int]], keeps: Primitive, is_cheap: bool
) -> Array:
    """Compute the gradient of a maximum over windows.

    The dy of each window goes to the window's first best element, as in XLA's select-and-scatter. Padding counts as elements.
    `keeps` is >=, or <= for the minimum. It is false beside a NaN, so that the element after a NaN is chosen.
    """
    worst = -math.inf if keeps.name == "ge" else math.inf
    best, *others = slice_taps(x, dy.shape, worst, pool, padding, is_cheap)
    first, *numbers = [pool.number(tap) for tap in itertools.product(*map(range, pool.size))]
    chosen = lax.full(dy.shape, first, "float32")
    for number, other in zip(numbers, others, strict=True):
        keep = keeps.bind(best, other)
        best = lax.select(keep, best, other)
        chosen = lax.select(keep, chosen, lax.full_like(chosen, number))
    return sum_over_windows(dy, chosen, [low for low, _ in padding], x.shape, pool)


def replace_sum_gradient(size: Sequence[int], maker: JaxprEqn | None, results: Shape) -> Replacement | None:
    """Replace the gradient of a sum over windows.

    Its pad, `maker`, puts zeros between the elements, and then windows are summed.
    """
    if maker is None or maker.primitive.name != "pad":
        return None
    source, zero = maker.invars
    config = maker.params["padding_config"]
    fits = all(0 <= low < taps for (low, _, _), taps in zip(config, size, strict=True))
    if not (fits and isinstance(zero, Literal) and zero.val == 0):
        return None
    pool = Pool(tuple(size), tuple(int(gap) + 1 for _, _, gap in config))
    low = [taps - 1 - int(low) for (low, _, _), taps in zip(config, size, strict=True)]

    def pooling_gradient(dy: Array) -> Array:
        return sum_over_windows(dy, None, low, results, pool)

    return Replacement(pooling_gradient, [source])


def sum_over_windows(source: Array, chosen: Array | None, low: Sequence[int], shape: Sequence[int], pool: Pool) -> Array:
    """Sum, for each element, `source` over the windows that cover it.

    If `chosen` is given, only windows that chose the element count.

    Element q * stride + phase, counted from `low` before the first, is tap phase + back * stride of window q - back. So there is
    a term for each `back`, the first window first: the order in which select-and-scatter adds.
    """
    blocks = [-(-(before + size) // stride) for before, size, stride in zip(low, shape, pool.strides, strict=True)]
    reach = [-(-size // stride) - 1 for size, stride in zip(pool.size, pool.strides, strict=True)]
    around = [(far, count - available, 0) for far, count, available in zip(reach, blocks, source.shape, strict=True)]
    full = [size for pair in zip(blocks, pool.strides, strict=True) for size in pair]
    at_block = range(0, len(full), 2)
    # XLA would move expressions that depend on no argument out of a loop, as large arrays; behind the barrier they depend on one.
    phases, source = lax.optimization_barrier(([lax.broadcasted_iota("float32", full, axis + 1) for axis in at_block], source))

    def read_windows(values: Array, back: Sequence[int]) -> Array:
        start = [far - steps for far, steps in zip(reach, back, strict=True)]
        return lax.broadcast_in_dim(slice_with_steps(values, start, blocks, [1] * len(blocks)), full, at_block)

    source = keep_in_memory(pad_array(source, 0, around))
    chosen = None if chosen is None else keep_in_memory(pad_array(chosen, -1, around))
    terms = []
    for back in itertools.product(*(range(far, -1, -1) for far in reach)):
        tap = [phase + first for phase, first in zip(phases, multiply_pairwise(back, pool.strides), strict=True)]
        if chosen is not None:
            masks = [lax.eq(read_windows(chosen, back), pool.number(tap))]
        else:
            uneven = [(place, size) for place, size, stride in zip(tap, pool.size, pool.strides, strict=True) if size % stride]
            masks = [lax.lt(place, lax.full_like(place, size)) for place, size in uneven]
        term = read_windows(source, back)
        terms.append(functools.reduce(lambda total, mask: lax.select(mask, total, lax.full_like(total, 0)), masks, term))
    total = lax.reshape(functools.reduce(lax.add, terms), multiply_pairwise(blocks, pool.strides))
    return slice_with_steps(total, low, shape, [1] * len(blocks))
