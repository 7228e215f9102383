"""A check that a model makes each row of its outputs of the same row of the batch alone, before it is trained.

The program of the forward pass is read first. Where no operation goes along an axis that may count rows, nothing is run. Otherwise the first row of
the batch is replaced: all other rows of the outputs must stay as they are, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unisono._src.jax_private.jaxprs import drop_unneeded
from unisono._src.operands import get_shape
from unisono._src.replica.marks import find_inner_programs
from unisono._src.replica.protocol import State
from unisono._src.typed_jax import jit, make_jaxpr, map_tree
from unisono._src.typing import AnyArray, Array, PyTree, Shape

MANY_ROWS = 13
"""The rows of the program that is read: a prime number, so that few other axes are as long as a multiple of it."""
FEW_ROWS = 4
"""The rows that the program is run on."""
SEARCHED = 64
"""The rows of a batch among which one is looked for that differs from the first."""


def depends_on_other_rows(compute: Callable[[State, PyTree], PyTree], state: State, x: PyTree) -> bool:
    """Return whether a row of what `compute(state, x)` returns depends on other rows of x. `x` is on the host.

    The answer is False where the rows of x are alike, and for code that was not written for other numbers of rows.
    """
    rows = map_tree(lambda array: array[:FEW_ROWS], x)
    changed = replace_first_row(rows, x)
    if changed is None or len(jax.tree.leaves(rows)[0]) < FEW_ROWS:
        return False

    def describe_rows(array: AnyArray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((MANY_ROWS, *array.shape[1:]), jnp.asarray(array).dtype)

    try:
        traced = make_jaxpr(compute)(state, map_tree(describe_rows, rows))
        program, _ = drop_unneeded(traced, [True] * len(traced.jaxpr.outvars))  # losses that layers add are means over the rows
        if not goes_along_rows(program):
            return False
        run = jit(compute)
        before, after = (jax.tree.leaves(run(state, map_tree(jnp.asarray, given))) for given in (rows, changed))
    except Exception:  # of the user's code, which was not written for so many rows, or of a callback in it
        return False
    outputs = zip(map(get_shape, program.jaxpr.outvars), before, after, strict=True)
    return any(are_others_moved(one, other) for shape, one, other in outputs if not is_table_of_rows(shape))


def replace_first_row(rows: PyTree, x: PyTree) -> PyTree | None:
    """Return the rows with another row of x in the place of the first; None where x has no other one."""
    leaves = jax.tree.leaves(x)
    others = range(1, min(SEARCHED, len(leaves[0])))
    other = next((row for row in others if any(not np.array_equal(leaf[0], leaf[row]) for leaf in leaves)), None)
    if other is None:
        return None
    return map_tree(lambda some, every: np.concatenate([every[other : other + 1], some[1:]]), rows, x)


def is_table_of_rows(shape: Shape) -> bool:
    """Return whether another axis than the first counts rows, of which `warn_of_row_tables` warns."""
    return any(may_count_rows(shape, axis) for axis in range(1, len(shape)))


def are_others_moved(before: Array, after: Array) -> bool:
    """Return whether other rows than the first have changed. An output of another length has no rows."""
    if not before.shape or len(before) != FEW_ROWS:
        return False
    return not np.array_equal(*(np.asarray(output[1:], "float64") for output in (before, after)), equal_nan=True)


def goes_along_rows(program: core.ClosedJaxpr) -> bool:
    """Return whether an operation of the program adds up, sorts, cuts, joins or loops along an axis that may count rows."""
    return any(
        any(may_count_rows(get_shape(equation.invars[0]), axis) for axis in list_axes(equation))
        or (equation.primitive.name == "scan" and equation.params["length"] % MANY_ROWS == 0)
        or any(map(goes_along_rows, list_programs(equation)))
        for equation in program.jaxpr.eqns
        if equation.invars
    )


def may_count_rows(shape: Shape, axis: int) -> bool:
    """Return whether the axis exists, and is as long as a multiple of the rows of the program that is read."""
    return axis < len(shape) and shape[axis] > 0 and shape[axis] % MANY_ROWS == 0


def list_axes(equation: core.JaxprEqn) -> Iterable[int]:
    """Return the axes of the first operand of which an element of the result may see several places, or another place."""
    name = equation.primitive.name
    params = equation.params
    shape = get_shape(equation.invars[0])
    if name == "dot_general":
        return params["dimension_numbers"][0][0]
    if name in ("gather", "dynamic_slice"):
        return [axis for axis, size in enumerate(params["slice_sizes"]) if size < shape[axis]]
    if name == "slice":
        return [axis for axis, length in enumerate(get_shape(equation.outvars[0])) if length < shape[axis]]
    if name.startswith(("scatter", "dynamic_update_slice", "reduce_window", "select_and")):
        return range(len(shape))
    for key in ("axes", "axis", "dimensions", "dimension"):  # of reduce_sum and the like, cumsum, rev, concatenate
        if key in params and name not in ("reshape", "squeeze"):
            axes: int | tuple[int, ...] = params[key]
            return axes if isinstance(axes, tuple) else [axes]
    return ()


def list_programs(equation: core.JaxprEqn) -> Iterable[core.ClosedJaxpr]:
    """Return the programs that an equation runs, those of loops too."""
    if equation.primitive.name in ("scan", "while"):
        return [inner for inner in equation.params.values() if isinstance(inner, core.ClosedJaxpr)]
    return find_inner_programs(equation)
