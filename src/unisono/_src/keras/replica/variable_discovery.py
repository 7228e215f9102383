"""Find the variables that user code reads and assigns.

One trace of the code, with nothing known, finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr

from unisono._src.keras.private.compiled_losses import hide_masks
from unisono._src.keras.private.optimizers import open_name_scope
from unisono._src.keras.replica.function_outputs import split_outputs
from unisono._src.keras.replica.row_axes import RowAxes
from unisono._src.keras.replica.trace_recorder import NotBuiltError, ReplicaCode, ReplicaScope, run_as_replica
from unisono._src.keras.replica.used_variables import UsedVariables, sort_variables
from unisono._src.keras.replica.user_function import CallUserFunction
from unisono._src.programs.operands import Atom
from unisono._src.typed_jax import make_jaxpr
from unisono._src.typing import AnyArray, Array, PyTree, Shape, UserObject

ROUNDS = 8
"""Each round builds some layers or an optimizer. More rounds mean that the code makes something again every time."""


def discover_variables(
    call: CallUserFunction,
    batch: PyTree,
    constants: PyTree,
    replicas: int,
    optimizers: Callable[[], Sequence[keras.optimizers.Optimizer]],
    metrics: Callable[[], Sequence[keras.metrics.Metric]],
    check: Callable[[Trace], None],
    suspicion: Callable[[AnyArray], bool] = lambda array: True,
    eager: bool = False,
) -> UsedVariables:
    """Find the variables of the code by their use. Layers and optimizers that are not built are built.

    Args:
        call: The code.
        batch: The rows of a replica, in shapes.
        constants: The arrays that are the same for every replica, in shapes.
        replicas: R.
        optimizers: Returns the optimizers that the code may read.
        metrics: Returns the metrics that it may feed.
        check: Raises for variables that the code must not use or assign, and for what its program must not do.
        suspicion: Whether an array that is not computed from rows may be an array that the code finds by a name.
        eager: Whether the code is called with arrays instead of traced with shapes. There is then no program to check.
    """
    known: set[int] = set()
    made: list[str] = []
    alive: list[ReplicaCode] = []  # so that no variable of an earlier round has the id of a later one's
    for left in reversed(range(ROUNDS)):
        code = ReplicaCode(ReplicaScope(), jnp.int32(0), replicas, jnp.float32(1))
        code.may_be_rows = suspicion
        alive.append(code)
        try:
            program = (call_code if eager else trace_code)(code, call, batch, constants, metrics())
        except NotBuiltError as error:
            with open_name_scope(error.optimizer):
                error.optimizer.build(error.variables)
            continue
        except Exception:
            # Code that builds a layer may fail in any way without its variables. In the next round the layer is built: another error stays.
            if code.scope.read.keys() <= known or not left:
                raise
            known |= code.scope.read.keys()
            continue
        variables = {**code.scope.read, **code.scope.assigned}
        if variables.keys() == known:
            check(Trace(code, program, len(jax.tree.leaves(batch))))
            return sort_variables(code, optimizers(), metrics())
        made = [variable.path for i, variable in variables.items() if i not in known]
        known = set(variables)
    raise make_remade_error(made)


def make_remade_error(paths: list[str]) -> ValueError:
    """Build the error about code that makes new variables each time."""
    return ValueError(
        f"Every run of the replica's code makes variables anew ({', '.join(map(repr, paths[:3]))}), whose values would be lost. Make "
        f"layers, metrics and variables once, inside strategy.scope(), and use them in the code."
    )


class Trace(NamedTuple):
    """The code, traced with nothing known."""

    code: ReplicaCode
    program: Any
    """A ClosedJaxpr; None where the code was called. Its arguments are the batch's arrays, the constants, the replica's number and its row
    fraction. Its results are the arrays that the code returns, and then those that it noted."""
    arrays: int
    """The number of arrays in the batch."""

    @property
    def used(self) -> list[keras.Variable]:
        """The variables that the code needs."""
        updated = [variable for update in self.code.updates for variable in update.optimizer.variables]
        return [*self.code.scope.read.values(), *self.code.scope.assigned.values(), *updated]

    @property
    def noted(self) -> dict[str, list[tuple[UserObject, Atom]]]:
        """The noted arrays by kind. Each is (its `NotedArrays.origin`, its variable in the jaxpr)."""
        origins = [(noted.kind, noted.origin) for noted in self.code.noted for _ in jax.tree.leaves(noted.arrays)]
        by_kind: dict[str, list[tuple[UserObject, Atom]]] = {}
        outputs = self.program.jaxpr.outvars
        for (kind, origin), variable in zip(origins, outputs[len(outputs) - len(origins) :], strict=True):
            by_kind.setdefault(kind, []).append((origin, variable))
        return by_kind

    @property
    def replica_position(self) -> int:
        """The position of the replica's number among the jaxpr's arguments."""
        return len(self.program.jaxpr.invars) - 2

    def find_results(self, *kinds: str) -> Iterator[tuple[UserObject, range]]:
        """Yield the notes of these kinds. Each is (its `NotedArrays.origin`, its positions among the jaxpr's results)."""
        start = len(self.returned)
        for noted in self.code.noted:
            stop = start + len(jax.tree.leaves(noted.arrays))
            if noted.kind in kinds and stop > start:
                yield noted.origin, range(start, stop)
            start = stop

    @property
    def returned(self) -> list[Atom]:
        """The jaxpr's variables for the arrays that the code returns."""
        outputs = self.program.jaxpr.outvars
        return outputs[: len(outputs) - sum(len(jax.tree.leaves(noted.arrays)) for noted in self.code.noted)]


def trace_user_function(
    call: CallUserFunction,
    batch: PyTree,
    constants: PyTree,
    replicas: int,
    metrics: Sequence[keras.metrics.Metric],
    other_shapes: Sequence[Shape] | None = None,
) -> Trace:
    """Trace code whose variables are known and built. `other_shapes` are those of its losses for another number of rows."""
    code = ReplicaCode(ReplicaScope(), jnp.int32(0), replicas, jnp.float32(1))
    return Trace(code, trace_code(code, call, batch, constants, metrics, other_shapes), len(jax.tree.leaves(batch)))


@hide_masks()
def trace_code(
    code: ReplicaCode,
    call: CallUserFunction,
    batch: PyTree,
    constants: PyTree,
    metrics: Sequence[keras.metrics.Metric],
    other_shapes: Sequence[Shape] | None = None,
) -> ClosedJaxpr:
    """Trace the code, and the arrays that it notes, to a jaxpr."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    code.rows = rows
    code.axes = RowAxes(rows, other_shapes)
    code.is_inspected = True

    def outputs(
        batch: PyTree, constants: Sequence[Array], replica: Array, row_fraction: Array
    ) -> tuple[list[Array], list[PyTree]]:
        code.replica = replica
        code.row_fraction = row_fraction
        code.begin()
        return split_outputs(call(batch, constants), code)[0], [noted.arrays for noted in code.noted]

    with run_as_replica(code, metrics):  # around the trace: variables that are made in it get their values after it
        return make_jaxpr(outputs)(batch, constants, np.int32(0), np.float32(1))


@hide_masks()
def call_code(
    code: ReplicaCode, call: CallUserFunction, batch: PyTree, constants: PyTree, metrics: Sequence[keras.metrics.Metric]
) -> None:
    """Call code that cannot be traced."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    code.rows = rows
    code.axes = RowAxes(rows)
    code.replica = jnp.int32(0)
    code.row_fraction = jnp.float32(1)
    code.begin()
    with run_as_replica(code, metrics):
        split_outputs(call(batch, constants), code)
