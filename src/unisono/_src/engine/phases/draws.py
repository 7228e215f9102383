"""Random draws and counts: a shard makes its own part.

Threefry makes each element of a draw from its flat index alone, where `jax_threefry_partitionable` is set, as it is by default.
So row i of the batch draws what it draws on the whole batch. A slice of the whole draw would be the same, but XLA computes all of
it on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from unisono._src.engine.phases.kinds import list_growing_axes
from unisono._src.engine.phases.twins import Equation
from unisono._src.programs.operands import get_shape
from unisono._src.typed_jax import settings
from unisono._src.typing import Array, Shape

Draw: TypeAlias = Callable[[Equation, list[Array], Array, Shape], Array]
"""`draw(equation, operands, start, shape)` gives the part of the shard that begins with the row `start`."""

MOST = 2**32
"""A draw must have fewer elements: its flat indices then fit into one word."""


def can_draw(equation: Equation) -> bool:
    """Whether shards can make their parts of a draw or a count."""
    if equation.name == "iota":
        return True
    if equation.name not in DRAWS or get_shape(equation.whole.invars[0]) != () or not settings.jax_threefry_partitionable:
        return False
    shape = get_shape(equation.whole.outvars[0])
    return "fry" in str(equation.whole.invars[0].aval) and math.prod(shape) < MOST


def is_random(equation: Equation) -> bool:
    """Whether an equation draws random numbers or keys."""
    return equation.name in DRAWS and equation.name != "iota"


def count_rows_from(equation: Equation, operands: list[Array], start: Array, shape: Shape) -> Array:
    """Build a shard's part of an `iota`."""
    axis, params = find_axis(equation, shape), equation.whole.params
    counts = lax.broadcasted_iota(params["dtype"], shape, params["dimension"])
    return counts + start.astype(counts.dtype) if params["dimension"] == axis else counts


def draw_bits(equation: Equation, operands: list[Array], start: Array, shape: Shape) -> Array:
    """Draw a shard's part of random bits."""
    first, second = hash_places(equation, operands[0], start, shape)
    width = equation.whole.params["bit_width"]
    if width == 64:
        return lax.shift_left(first.astype(jnp.uint64), jnp.uint64(32)) | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{width}")


def split_keys(equation: Equation, operands: list[Array], start: Array, shape: Shape) -> Array:
    """Make a shard's part of the keys split off one key."""
    words = hash_places(equation, operands[0], start, shape)
    return jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl="threefry2x32")


def hash_places(equation: Equation, key: Array, start: Array, shape: Shape) -> tuple[Array, Array]:
    """Hash each flat index of a shard's part to threefry's two words."""
    whole, axis = get_shape(equation.whole.outvars[0]), find_axis(equation, shape)
    places = jnp.zeros(shape, jnp.uint32)
    for number in range(len(shape)):
        count = lax.broadcasted_iota(jnp.uint32, shape, number)
        places += (count + start.astype(jnp.uint32) if number == axis else count) * jnp.uint32(math.prod(whole[number + 1 :]))
    first, second = jax.random.key_data(key)
    broadcast = [jnp.broadcast_to(word, shape) for word in (first, second)]
    bits = threefry2x32_p.bind(*broadcast, jnp.zeros_like(places), places)
    return bits[0], bits[1]


def find_axis(equation: Equation, shape: Shape) -> int:
    """Find the axis of the rows, along which a part is shorter."""
    return list_growing_axes(get_shape(equation.whole.outvars[0]), shape)[0]


DRAWS: dict[str, Draw] = {"random_bits": draw_bits, "random_split": split_keys, "iota": count_rows_from}
