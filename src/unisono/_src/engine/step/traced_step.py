"""A step as JAX traces it, and the values between the step program and a step in shards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from unisono._src.engine.phases.twins import ProgramsDifferError
from unisono._src.engine.state import UNTOLD_LOSS, RecordedVariables, State
from unisono._src.engine.xla import determinism
from unisono._src.kernels.layers.batch_normalization import replace_for_shards
from unisono._src.kernels.rewriting import trace_as_rewritten
from unisono._src.programs.inlining import inline_calls
from unisono._src.programs.marks import GRADIENT, LAYER_SCOPE, LOSS, OUTPUT, find_marked
from unisono._src.typing import Array, Logs, PyTree

Sums: TypeAlias = list[list[Array]]
"""For each phase what all shards have added up."""


class ShardWork(NamedTuple):
    """The results of one shard in one phase."""

    added: list[Array]
    """Added up over all shards."""
    outputs: list[Array]
    """Left on the shard's device."""
    kept: list[Array]
    """Read by the same shard in a later phase."""


class StepEnd(NamedTuple):
    """The results of a step."""

    state: State
    logs: Logs
    gradients: list[Array]
    """The gradients as the optimizer takes them. A step that does not report them has none."""
    loss: Array
    """`UNTOLD_LOSS` if the step does not report it."""


class Known(NamedTuple):
    """The values that are the same for all shards."""

    state: State
    """The state before the step."""
    totals: Sums
    """The totals of the phases so far."""
    made: list[list[Array]]
    """What was computed before each phase."""
    constants: Sequence[Array]
    """Arrays that are the same for every replica and step."""


class InspectedProgram(NamedTuple):
    """A program that computes the step, with its arguments. The state and the batch come first."""

    function: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    batch: PyTree
    rows: range
    """The rows of the global batch that the batch has."""


Part: TypeAlias = tuple[list[Array | None], Array | None]
"""A replica's parts of the gradients, and of the loss; None for what is no sum of parts."""


class StepFunction(Protocol):
    """A step as a function of state, batch and constants."""

    returns_rows: bool
    """Whether rows that it returns beside the state stay on the shards, as outputs."""
    is_of_replicas: bool
    """Whether it is the code of replicas, which return values of their own."""
    has_own_logs: bool
    """Whether logs are others than the results of the metrics; known after a trace."""

    def __call__(self, state: State, batch: PyTree, constants: Sequence[Array]) -> tuple[State, Logs]: ...

    def list_recorded(self) -> RecordedVariables:
        """List the variables that a record of a step has. The function is not traced for it."""
        ...

    def note_gathered(self, gathered: Sequence[tuple[str, int]]) -> None:
        """Take note of rows that are gathered inside the step.

        Each item is the scopes of the equation that reads them, and their bytes.
        """
        ...

    def explain_rows(self, rows: int, batch_rows: int) -> contextlib.AbstractContextManager[None]:
        """Explain errors of a trace for a number of rows."""
        ...

    def note_other_programs(self, error: ProgramsDifferError) -> None:
        """Report code whose program changes with the number of rows, and is computed for the whole batch; or refuse it."""
        ...


class StepArguments(NamedTuple):
    """The arguments of a step, in shapes."""

    state: State
    batch: PyTree
    constants: Sequence[Array]


class TracedStep:
    """The program of a step for a number of rows. Marked values are its last results."""

    def __init__(self, function: StepFunction, shapes: StepArguments, lead: jax.Device) -> None:
        with jax.default_device(determinism.choose_compile_device(lead)), replace_for_shards(LAYER_SCOPE):
            traced, self._shapes = trace_as_rewritten(function, lead.platform)(*shapes)
        program = inline_calls(traced)
        self.gradients = find_marked(program.jaxpr, GRADIENT)
        self.losses = find_marked(program.jaxpr, LOSS)[:1]
        self.outputs = find_marked(program.jaxpr, OUTPUT)
        marked = [*self.gradients, *self.losses, *self.outputs]
        self.program = core.ClosedJaxpr(program.jaxpr.replace(outvars=[*program.jaxpr.outvars, *marked]), program.consts)

    def end(self, results: Sequence[Array | None]) -> tuple[StepEnd, list[Array]]:
        """Split the program's results into step results and replica outputs. Logs that are None are left out."""
        counts = [len(jax.tree.leaves(self._shapes[0])), len(self._shapes[1]), len(self.gradients), len(self.losses)]
        state, logs, gradients, losses, outputs = (
            results[start:end] for start, end in itertools.pairwise([0, *itertools.accumulate(counts), None])
        )
        told = {name: log for name, log in zip(sorted(self._shapes[1]), logs, strict=True) if log is not None}
        loss = next((loss for loss in losses if loss is not None), jnp.asarray(UNTOLD_LOSS))
        told_gradients = [gradient for gradient in gradients if gradient is not None]
        end = StepEnd(jax.tree.unflatten(jax.tree.structure(self._shapes[0]), state), told, told_gradients, loss)
        return end, [output for output in outputs if output is not None]
