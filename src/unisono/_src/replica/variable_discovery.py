"""What code of the user's reads and assigns, found by tracing it once with nothing known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src import keras_private
from unisono._src.replica.compiled_model import scaling_variables
from unisono._src.replica.trace_recorder import NotBuiltError, ReplicaCode, ReplicaScope, running
from unisono._src.replica.user_function import Call, Variables, split

ROUNDS = 8
"""Each builds some layers or an optimizer; more than so many mean that something is made again every time."""


def discover(
    call: Call,
    batch: Any,
    constants: Any,
    replicas: int,
    optimizers: Callable[[], Sequence[Any]],
    metrics: Callable[[], Sequence[Any]],
    check: Callable[[Trace], None],
    suspicion: Callable[[Any], bool] = lambda array: True,
    eager: bool = False,
) -> Variables:
    """Builds what is not built, and sorts what is found.

    Args:
        call: The code.
        batch: The rows of a replica, in shapes.
        constants: What is the same for every replica, in shapes.
        replicas: R.
        optimizers: Those that the code may read, as they are then.
        metrics: Those that it may feed.
        check: Raises for variables that the code must not use or assign, and for what its program must not do.
        suspicion: Whether an array that is not computed from rows may be one that the code finds by a name.
        eager: Whether the code is called instead, with arrays in place of shapes: then there is no program to check.
    """
    known: set[int] = set()
    made: list[str] = []
    alive = []  # so that no variable of an earlier round has the id of a later one's
    for _ in range(ROUNDS):
        code = ReplicaCode(ReplicaScope(), jnp.int32(0), replicas, jnp.float32(1), None)
        code.suspicion = suspicion
        alive.append(code)
        try:
            program = (called if eager else traced)(code, call, batch, constants, metrics())
        except NotBuiltError as error:
            with keras_private.name_scope_of(error.optimizer):
                error.optimizer.build(error.variables)
            continue
        except Exception:
            if code.scope.read.keys() <= known:
                raise
            known |= code.scope.read.keys()  # a layer was built on the way, whose variables the code will find there next time
            continue
        found = {**code.scope.read, **code.scope.assigned}
        if found.keys() == known:
            check(Trace(code, program, len(jax.tree.leaves(batch))))
            return sorted_out(code, optimizers(), metrics())
        made, known = [v.path for i, v in found.items() if i not in known], set(found)
    raise ValueError(
        f"Every run of the replica's code makes variables anew ({', '.join(map(repr, made[:3]))}), whose values would be lost. Make "
        f"layers, metrics and variables once, inside strategy.scope(), and use them in the code."
    )


class Trace(NamedTuple):
    """The code, traced with nothing known."""

    code: ReplicaCode
    program: Any
    """From the batch's arrays, the constants, the replica's number and its share of the rows to what the code returns and then what it
    noted."""
    arrays: int
    """How many arrays the batch has."""

    @property
    def used(self) -> list[Any]:
        """The variables that the code needs."""
        updated = [v for update in self.code.updates for v in update.optimizer.variables]
        return [*self.code.scope.read.values(), *self.code.scope.assigned.values(), *updated]

    @property
    def noted(self) -> dict[str, list[tuple[Any, Any]]]:
        """By kind: (of what, the variable in the program), one for each array."""
        arrays = [(n.kind, n.of) for n in self.code.noted for _ in jax.tree.leaves(n.arrays)]
        found: dict[str, list[tuple[Any, Any]]] = {}
        outputs = self.program.jaxpr.outvars
        for (kind, of), variable in zip(arrays, outputs[len(outputs) - len(arrays) :], strict=True):
            found.setdefault(kind, []).append((of, variable))
        return found

    @property
    def number_of_replica(self) -> int:
        """The position, among the program's arguments, of the replica's number."""
        return len(self.program.jaxpr.invars) - 2

    def results_of(self, *kinds: str) -> Iterator[tuple[Any, range]]:
        """(of what, the positions among the program's results) for everything of these kinds that was noted."""
        start = len(self.returned)
        for noted in self.code.noted:
            stop = start + len(jax.tree.leaves(noted.arrays))
            if noted.kind in kinds and stop > start:
                yield noted.of, range(start, stop)
            start = stop

    @property
    def returned(self) -> list[Any]:
        """The variables in the program for the arrays that the code returns."""
        outputs = self.program.jaxpr.outvars
        return outputs[: len(outputs) - sum(len(jax.tree.leaves(noted.arrays)) for noted in self.code.noted)]


def trace(call: Call, batch: Any, constants: Any, replicas: int, metrics: Sequence[Any]) -> Trace:
    """Of code whose variables are known and built."""
    code = ReplicaCode(ReplicaScope(), jnp.int32(0), replicas, jnp.float32(1), None)
    return Trace(code, traced(code, call, batch, constants, metrics), len(jax.tree.leaves(batch)))


@keras_private.fresh_masks()
def traced(code: ReplicaCode, call: Call, batch: Any, constants: Any, metrics: Sequence[Any]) -> Any:
    code.rows, code.is_looked_at = jax.tree.leaves(batch)[0].shape[0], True

    def outputs(batch: Any, constants: Any, replica: Any, share: Any) -> Any:
        code.replica, code.share_of_rows = replica, share
        code.begin()
        return split(call(batch, constants), code)[0], [noted.arrays for noted in code.noted]

    with running(code, metrics):  # around the trace: variables that are made in it get their values behind it
        return jax.make_jaxpr(outputs)(batch, constants, np.int32(0), np.float32(1))


@keras_private.fresh_masks()
def called(code: ReplicaCode, call: Call, batch: Any, constants: Any, metrics: Sequence[Any]) -> None:
    """Call the code, which cannot be traced."""
    code.rows = jax.tree.leaves(batch)[0].shape[0]
    code.replica, code.share_of_rows = jnp.int32(0), jnp.float32(1)
    code.begin()
    with running(code, metrics):
        split(call(batch, constants), code)


def sorted_out(code: ReplicaCode, optimizers: Sequence[Any], metrics: Sequence[Any]) -> Variables:
    found = {**code.scope.read, **code.scope.assigned}
    applied = [
        (
            update.optimizer,
            [position for position, v in enumerate(keras_private.weights_of(update.optimizer)) if id(v) in update.gradients],
        )
        for update in code.updates
    ]
    updated = {id(update.optimizer) for update in code.updates}
    read = [o for o in optimizers if id(o) not in updated and any(id(v) in found for v in o.variables)]
    used_optimizers = [*(update.optimizer for update in code.updates), *read]
    used_metrics = [m for m in metrics if any(id(v) in found for v in m.variables)]
    owned = {id(v) for thing in [*used_optimizers, *used_metrics] for v in thing.variables}
    weights = {id(v): v for o, _ in applied for v in keras_private.weights_of(o)}
    weights |= {i: v for i, v in found.items() if v.trainable and i not in owned}
    others = [v for i, v in found.items() if i not in owned and i not in weights]
    refuse_assigned(code, weights)
    scales = {id(v) for o, _ in applied for v in scaling_variables(o)}
    slots = {id(v) for o in used_optimizers for v in o.variables}
    return Variables(
        list(weights.values()),
        others,
        used_optimizers,
        used_metrics,
        applied,
        [position for position, v in enumerate(others) if id(v) in code.scope.assigned],
        any(i in slots and i not in scales for i in code.scope.read),
    )


def refuse_assigned(code: ReplicaCode, weights: dict[int, Any]) -> None:
    for index in itertools.filterfalse(lambda i: i not in weights, code.scope.assigned):
        raise ValueError(
            f"The replica's code assigns {weights[index].path!r}, a trainable variable: replicas cannot agree on its value. Trainable "
            f"state changes through optimizer.apply alone; make other state with trainable=False."
        )
