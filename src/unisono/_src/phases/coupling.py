"""Whether a row of what a function returns is made of other rows of the batch, too."""

from __future__ import annotations

from collections.abc import Callable

import jax

from unisono._src.phases.analysis import Analysis
from unisono._src.phases.rules import RULES, loops
from unisono._src.phases.twins import pair, trace
from unisono._src.typed_jax import map_tree
from unisono._src.typing import AnyArray, PyTree

ROWS, SHARD_ROWS = 12, 4
"""The rows for which a function is traced. Few other axes are as long."""


def sees_other_rows(function: Callable[[PyTree, PyTree], PyTree], state: PyTree, x: PyTree) -> bool:
    """Return whether rows of what `function(state, x)` returns depend on other rows of x.

    Nothing is run. The answer is False where it cannot be known: for code that was written for one number of rows, and for loops and
    callbacks that rows go through.
    """

    def describe(rows: int) -> tuple[PyTree, PyTree]:
        def describe_rows(array: AnyArray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype))

        return state, map_tree(describe_rows, x)

    has_rows = [False] * len(jax.tree.leaves(state)) + [True] * len(jax.tree.leaves(x))
    try:
        programs = [trace(function, describe(rows))[0] for rows in (ROWS, SHARD_ROWS)]
        analysis = Analysis(pair(programs[0], programs[1], ROWS, SHARD_ROWS), has_rows)
    except Exception:  # of the user's code, which was not written for so many rows
        return False
    if any(equation.name not in RULES or equation.name in loops.RULES for equation in analysis.gathered.values()):
        return False
    outputs = analysis.twins.outputs
    return any(analysis.kind_of(atom).level > 0 for atom in outputs if analysis.twins.find_growing(atom) == [0])
