"""Poolings as elementwise expressions of strided slices, one for each of a window's positions (its "taps")."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Primitive

from unisono._src.xla.rewrite.arrays import kept, padded, strided
from unisono._src.xla.rewrite.equations import MadeBy, Replacement, shape
from unisono._src.xla.rewrite.spread import Pool, spread_out

MOST_TAPS = 64
"""They are unrolled."""

MOST_CHOICES = 49
"""Of the largest among more elements XLA's own gradient is as fast."""

FOLDS: dict[str, tuple[Callable[[Any, Any], Any], float]] = {
    "reduce_window_max": (lax.max, -math.inf),
    "reduce_window_min": (lax.min, math.inf),
    "reduce_window_sum": (lax.add, 0),
}


def rule(eqn: JaxprEqn, made_by: MadeBy) -> Replacement | None:
    p, (x,), results = eqn.params, eqn.invars, shape(eqn.outvars[0])
    pool, padding = Pool(p["window_dimensions"], p["window_strides"]), p["padding"]
    if math.prod(pool.size) > MOST_TAPS or any(n != 1 for n in p["base_dilation"] + p["window_dilation"]):
        return None
    if eqn.primitive.name == "reduce_window_sum" and set(pool.strides) == {1} and not any(map(any, padding)):
        gradient = sum_gradient(pool.size, made_by.get(x), results)
        if gradient:
            return gradient
    fold, identity = FOLDS[eqn.primitive.name]
    is_cheap = is_biased_convolution(x, made_by)

    def pooling(x: Any) -> Any:
        return functools.reduce(fold, taps(x, results, identity, pool, padding, is_cheap))

    return Replacement(pooling, [x])


def max_gradient_rule(eqn: JaxprEqn, made_by: MadeBy) -> Replacement | None:
    p = eqn.params
    pool = Pool(p["window_dimensions"], p["window_strides"])
    if math.prod(pool.size) > MOST_CHOICES:
        return None
    is_cheap = is_biased_convolution(eqn.invars[1], made_by)

    def pooling_gradient(dy: Any, x: Any) -> Any:
        return max_gradient(dy, x, pool, p["padding"], p["select_prim"], is_cheap)

    return Replacement(pooling_gradient, eqn.invars)


def max_gradient_rule_without_overlap(eqn: JaxprEqn, made_by: MadeBy) -> Replacement | None:
    pool = Pool(eqn.params["window_dimensions"], eqn.params["window_strides"])
    return None if pool.overlaps else max_gradient_rule(eqn, made_by)


def taps(
    x: Any, results: Sequence[int], identity: float, pool: Pool, padding: Sequence[tuple[int, int]], is_cheap: bool
) -> list[Any]:
    """For each position of a window, its element in all windows.

    Args:
        is_cheap: Whether x may as well be computed again by each reader, where none reads an element twice.
    """
    if not is_cheap or pool.overlaps or any(map(any, padding)):
        x = kept(padded(x, identity, [(low, high, 0) for low, high in padding]))
    return [strided(x, tap, results, pool.strides) for tap in itertools.product(*map(range, pool.size))]


def is_biased_convolution(x: Any, made_by: MadeBy) -> bool:
    """Whether two simple steps lead from a convolution to x at most, as a bias and a ReLU are. Normalization is longer: to compute it
    again takes longer than to read it again."""
    for _ in range(2):
        made = made_by.get(x)
        if made is None or made.primitive.name not in ("add", "max", "jit", "custom_jvp_call"):
            break
        x = next((of for of in made.invars if shape(of) == shape(x)), x)
    return (made := made_by.get(x)) is not None and made.primitive.name == "conv_general_dilated"


def max_gradient(dy: Any, x: Any, pool: Pool, padding: Sequence[tuple[int, int]], keeps: Primitive, is_cheap: bool) -> Any:
    """Each window's dy goes to its first best element: the choice that XLA's select-and-scatter makes, padding included.

    `keeps` is >=, or <= for the smallest. It is false beside a NaN, so that the element after a NaN is chosen over it.
    """
    worst = -math.inf if keeps.name == "ge" else math.inf
    best, *others = taps(x, dy.shape, worst, pool, padding, is_cheap)
    first, *numbers = [pool.number(tap) for tap in itertools.product(*map(range, pool.size))]
    chosen = lax.full(dy.shape, first, "float32")
    for number, other in zip(numbers, others, strict=True):
        keep = keeps.bind(best, other)
        best, chosen = lax.select(keep, best, other), lax.select(keep, chosen, lax.full_like(chosen, number))
    return spread_out(dy, chosen, [low for low, _ in padding], x.shape, pool)


def sum_gradient(size: Sequence[int], made: JaxprEqn | None, results: tuple[int, ...]) -> Replacement | None:
    """The gradient of a sum over windows, if `made` says so: zeros laid between the elements by a pad, then a sum."""
    if made is None or made.primitive.name != "pad":
        return None
    (source, zero), config = made.invars, made.params["padding_config"]
    fits = all(0 <= low < taps for (low, _, _), taps in zip(config, size, strict=True))
    if not (fits and isinstance(zero, Literal) and zero.val == 0):
        return None
    pool = Pool(tuple(size), tuple(int(gap) + 1 for _, _, gap in config))
    low = [taps - 1 - int(low) for (low, _, _), taps in zip(config, size, strict=True)]

    def pooling_gradient(dy: Any) -> Any:
        return spread_out(dy, None, low, results, pool)

    return Replacement(pooling_gradient, [source])
