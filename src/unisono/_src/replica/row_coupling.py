"""Functions of a batch: does the output have rows, and are they coupled?

R replicas, each with its own rows, get another value of a loss that couples rows than the whole batch. A loss over all pairs of a batch has
fewer pairs in a replica. The root of a mean is not the mean of roots.
"""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Hashable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.replica.drawn_values import ShapedValue, draw_rows_like
from unisono._src.replica.marks import find_compared_values, mark_rows
from unisono._src.typed_jax import eval_shape, make_jaxpr, map_tree
from unisono._src.typing import Array, PyTree, Shape, UserFunction

ROWS = 8
MOST_ELEMENTS = 1 << 24
"""The largest number of elements of a batch that is drawn to try a function."""
CLOSE = 1e-5
"""The tolerance for rounding. It is small, since rows of a saturated function have nearly the same values."""
CLOSE_IN_HALF = 1e-2
"""The tolerance where an argument has half precision."""


class OutputAxis(enum.Enum):
    """The axis of rows in the output of a function."""

    FIRST = "the first"
    SQUEEZED = "of one row, removed, as `ops.squeeze` does"
    ABSENT = "none"


class OutputRows:
    """Answers whether the first axis of a function's output counts rows, with one trial for each function and batch of some shapes.

    A function that returns three numbers for any batch must not be mistaken for one that returns a number for each of three rows. Twice the
    rows are tried, since a function may take rows in pairs or in triplets.
    """

    def __init__(self, eager: bool = False, alone: bool = False) -> None:
        """`eager`: functions are called with arrays, since code that is not compiled need not be traceable.
        `alone`: one replica has all rows."""
        self._eager = eager
        self.alone = alone
        self._axes: dict[Hashable, OutputAxis] = {}
        self._are_coupled: dict[int, bool] = {}

    def __call__(self, owner: object, function: UserFunction, *batch: PyTree) -> bool:
        """Return whether the output of `function` grows with the rows of its arguments. `owner` is the loss or the metric of the function."""
        return self._find_axis(owner, function, batch) != OutputAxis.ABSENT

    def restore(self, values: Array, owner: object, function: UserFunction, *batch: PyTree) -> Array:
        """Return an output of `function` with the axis of one row, if the function has removed it."""
        is_squeezed = self._find_axis(owner, function, batch) == OutputAxis.SQUEEZED
        return jnp.expand_dims(values, 0) if is_squeezed else values

    def _find_axis(self, owner: object, function: UserFunction, batch: tuple[PyTree, ...]) -> OutputAxis:
        leaves = jax.tree.leaves(batch)
        key = id(owner), tuple((array.shape, str(array.dtype)) for array in leaves)
        if key not in self._axes:
            self._axes[key] = OutputAxis.ABSENT
            if all(array.shape for array in leaves):
                self._axes[key] = self._try_function(function, batch, {array.shape[0] for array in leaves})
        return self._axes[key]

    def _try_function(self, function: UserFunction, batch: tuple[PyTree, ...], counts: set[int]) -> OutputAxis:
        """Return the axis of rows in the output for a batch whose arrays have these numbers of rows."""
        once = self._measure_output(function, batch, 1)
        if (
            self.alone and len(counts) > 1
        ):  # targets are broadcast over a batch that is not cut: twice the rows of each are no such batch
            return OutputAxis.FIRST if once else OutputAxis.ABSENT
        return find_output_axis(once, self._measure_output(function, batch, 2), counts == {1})

    def warn_if_coupled(self, loss: object, function: UserFunction, *batch: PyTree) -> None:
        """Warn once of a loss whose value does not follow from its values on parts of the rows."""
        if id(loss) not in self._are_coupled and not self.alone:
            self._are_coupled[id(loss)] = couples_rows(function, batch)
            if self._are_coupled[id(loss)]:
                warn_of_coupling(f"The loss {find_loss_name(loss)!r}")

    def was_warned(self, loss: object) -> bool:
        """Return whether `warn_if_coupled` has warned of this loss."""
        return self._are_coupled.get(id(loss), False)

    def _measure_output(self, function: UserFunction, batch: tuple[PyTree, ...], times: int) -> Shape:
        """Return the shape of the output for `times` as many rows."""

        def repeat(array: Array) -> Array:
            return jnp.concatenate([array] * times)

        shapes = describe_shapes(batch, times)
        output = function(*map_tree(repeat, batch)) if self._eager else eval_shape(function, *shapes)
        return tuple(output.shape)


def find_output_axis(once: Shape, twice: Shape, is_one_row: bool) -> OutputAxis:
    """Return the axis of rows from the shapes of the output for some rows, and for twice as many.

    >>> find_output_axis((4, 3), (8, 3), False).name, find_output_axis((3,), (2, 3), True).name, find_output_axis((3,), (3,), False).name
    ('FIRST', 'SQUEEZED', 'ABSENT')
    """
    if is_one_row and len(twice) == len(once) + 1:
        return OutputAxis.SQUEEZED
    return OutputAxis.FIRST if once and len(once) == len(twice) and twice[0] > once[0] else OutputAxis.ABSENT


def describe_shapes(arrays: PyTree, times: int = 1) -> PyTree:
    """Return the shapes of arrays, with `times` as many rows."""

    def describe_shape(array: ShapedValue) -> jax.ShapeDtypeStruct:
        rows = tuple(length * times for length in array.shape[:1])
        return jax.ShapeDtypeStruct((*rows, *array.shape[1:]), array.dtype)

    return map_tree(describe_shape, arrays)


def find_loss_name(loss: object) -> str:
    return getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)


def couples_rows(function: UserFunction, batch: tuple[PyTree, ...]) -> bool:
    """Return whether the value of `function` on some rows does not follow from its values on their halves, by concatenation or, of one number
    for all rows, by the mean or the sum.

    `batch` gives the shapes and dtypes of the arguments; their values are drawn. The answer is False for a function that fails on drawn values
    or draws numbers itself.
    """
    if sum(np.prod(array.shape[1:], dtype=int) for array in jax.tree.leaves(batch)) * ROWS > MOST_ELEMENTS:
        return False
    return any(has_coupling(function, rows) for rows in draw_batches(function, batch))


def draw_batches(function: UserFunction, batch: tuple[PyTree, ...]) -> Iterator[list[PyTree]]:
    """Yield rows whose targets, the first argument, are numbers, then bits; each also with marks of rows that do not count."""

    def resize(array: ShapedValue) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((ROWS, *array.shape[1:]) if array.shape else (), array.dtype)

    try:
        program = make_jaxpr(function)(*map_tree(resize, batch))
        compared = find_compared_values(program, range(len(jax.tree.leaves(batch))))
    except Exception:  # of the user's code, which was not written for so many rows: no marks are known then
        compared = {}
    for targets in ("numbers", "bits"):
        rng = np.random.default_rng(0)
        draw = functools.partial(draw_rows_like, rng, rows=ROWS)
        rows = [*map_tree(functools.partial(draw, kind=targets), batch[:1]), *map_tree(draw, batch[1:])]
        yield rows
        leaves, structure = jax.tree.flatten(rows)
        for arrays in mark_rows(rng, leaves, compared):
            yield jax.tree.unflatten(structure, arrays)


def has_coupling(function: UserFunction, whole: list[PyTree]) -> bool:
    """Return whether the value of the function on these rows does not follow from its values on their halves."""

    def call_on(rows: slice) -> np.ndarray:
        def select(array: np.ndarray) -> Array:
            return jnp.asarray(array[rows] if array.ndim else array)

        return np.asarray(function(*map_tree(select, whole)))

    half = ROWS // 2
    try:
        with jax.ensure_compile_time_eval():
            value, again, first, second = map(call_on, (slice(None), slice(None), slice(half), slice(half, None)))
    except Exception:  # of the user's code, on values that it was not written for; the step runs it on real ones
        return False
    tolerance = choose_tolerance(jax.tree.leaves(whole))
    if not are_values_close(value, again, tolerance) or not np.all(np.isfinite(value)):
        return False
    if not (np.all(np.isfinite(first)) and np.all(np.isfinite(second))):
        return True  # for example, a mean over nothing
    together = [first + second, (first + second) / 2] if value.shape == first.shape else [np.concatenate([first, second])]
    return not any(are_values_close(value, merged, tolerance) for merged in together)


def choose_tolerance(arrays: Iterable[ShapedValue]) -> float:
    halves = (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4 for array in arrays)
    return CLOSE_IN_HALF if any(halves) else CLOSE


def are_values_close(value: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    if value.shape != expected.shape or not np.all(np.isfinite(expected)):
        return False
    return bool(np.allclose(value, expected, rtol=tolerance, atol=tolerance * float(np.max(np.abs(expected), initial=0))))


def warn_of_coupling(what: str) -> None:
    warnings.warn(describe_coupling(what), stacklevel=2)


def describe_coupling(what: str) -> str:
    return (
        f"{what} makes of all rows together what is not made of their parts. Each replica has its own rows alone, so that R replicas "
        f"have another loss than the whole batch, as with batch normalization. If it is to see the whole batch, write replicas=1."
    )
