"""The step of predict: the outputs of every row, in order, and the state that the forward pass leaves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from unisono._src.data.global_batch import GlobalBatch, count_shard_rows
from unisono._src.exchange.gather_rows import get_row_gatherer
from unisono._src.exchange.protocol import Exchange
from unisono._src.placement import Placement
from unisono._src.replica.model_step import ModelStep
from unisono._src.replica.predictions import PredictComputation
from unisono._src.replica.protocol import State
from unisono._src.step.eager import EagerStep
from unisono._src.step.run_outputs import RunOutput
from unisono._src.step.step import Step
from unisono._src.typed_jax import device_put, map_tree
from unisono._src.typing import Array, Outputs, Shape
from unisono._src.xla.programs import DeviceProgram


class PredictStep:
    """The step of predict: takes (weights, other state) and global batches; returns outputs, on the lead device, and the new state."""

    has_own_logs = True

    def __init__(self, functions: PredictComputation | ModelStep, placement: Placement, exchange: Exchange) -> None:
        self._functions = functions
        self._placement = placement
        is_compiled = isinstance(functions, ModelStep)
        step = Step("predict", functions, placement, exchange, 1) if is_compiled else EagerStep(functions, placement, exchange)
        self._step: Step | EagerStep = step
        self._structures: dict[Hashable, jax.tree_util.PyTreeDef] = {}
        """The structures of the outputs, by the kinds of batches."""
        self._checked: set[Hashable] = set()
        """The kinds of batches, with their rows, whose outputs have rows."""
        self._join_rows = functools.cache(make_row_joiner)
        self._rows_of_all = get_row_gatherer(placement) if placement.processes else None

    def __call__(self, state: State, batches: Sequence[GlobalBatch]) -> tuple[Outputs, State]:
        """Return the outputs of all the batches' rows, and the new state."""
        outputs: list[Outputs] = []
        for batch in batches:
            whole, runs = self._step.outputs(state, [batch])
            state = self._step.state
            traced = cast("jax.tree_util.PyTreeDef", self._functions.structure)  # the step has set it
            structure = self._structures.setdefault(batch.signature, traced)
            rows = iter(self._collect_rows(batch, runs) if len(whole) < structure.num_leaves else [])
            names = map(str, range(structure.num_leaves))
            leaves = [whole[name] if name in whole else next(rows) for name in names]
            outputs.append(jax.tree.unflatten(structure, leaves))
        return map_tree(lambda *parts: jnp.concatenate(parts), *outputs) if len(outputs) > 1 else outputs[0], state

    @property
    def state(self) -> State:
        """Return the newest state, on the lead device; empty before the first step."""
        return self._step.state

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._step.forget()

    def _collect_rows(self, batch: GlobalBatch, runs: list[RunOutput]) -> list[Array]:
        """Return the outputs of all rows of a batch, on the lead."""
        if self._functions.has_one_replica:
            return [array[0] for array in runs[0].arrays]
        for run_output in runs:
            self._check_rows(batch, [array.shape[1:] for array in run_output.arrays], run_output.run.size)
        lead = self._placement.lead
        arrays = device_put([list(run_output.arrays) for run_output in runs], lead)
        shapes = tuple(tuple((array.shape, array.dtype) for array in run) for run in arrays)
        counts = tuple(run_output.run.count for run_output in runs)
        own: list[Array] = self._join_rows(counts)(lead, shapes, arrays) if runs else []
        return own if self._rows_of_all is None else self._gather_rows(batch, own)

    def _check_rows(self, batch: GlobalBatch, shapes: Sequence[Shape], rows: int) -> None:
        """Refuse outputs whose first axis does not count rows, or another axis does: the outputs of replicas are joined along the first."""
        key = batch.signature, rows
        if key in self._checked:
            return
        grown = None
        # Several entries for each row, or lengths that may be multiples of the rows by chance.
        if any(shape and (shape[0] != rows or any(size % rows == 0 for size in shape[1:])) for shape in shapes):
            with contextlib.suppress(Exception):  # of the user's code, which was not written for more rows
                grown = [tuple(shape.shape) for shape in self._step.output_shapes(batch, 2 * rows)]
        check_output_rows(shapes, rows, grown)
        self._checked.add(key)

    def _gather_rows(self, batch: GlobalBatch, own: list[Array]) -> list[Array]:
        """Return the outputs of all processes."""
        assert self._rows_of_all is not None
        sizes = count_shard_rows(batch, self._placement.replicas)
        rows_of_last = max(filter(None, reversed(sizes)))
        like = self._step.output_shapes(batch, rows_of_last)
        self._check_rows(batch, [shape.shape for shape in like], rows_of_last)
        own = own or list(device_put([jnp.zeros((0, *shape.shape[1:]), shape.dtype) for shape in like], self._placement.lead))
        process_rows = [sum(sizes[block.start : block.stop]) for block in self._placement.of_processes]
        counts = [[shape.shape[0] // rows_of_last * rows for rows in process_rows] for shape in like]
        return self._rows_of_all(own, counts)


def make_row_joiner(counts: tuple[int, ...]) -> DeviceProgram:
    """Return the program that joins the rows of runs with these numbers of replicas."""
    return DeviceProgram(functools.partial(join_rows, counts))


def join_rows(counts: Sequence[int], runs: Sequence[Sequence[Array]]) -> list[Array]:
    """Return each output as one array of rows; `counts` are the replicas of each run, which lie stacked and first in its arrays."""
    by_output = [
        [array[:count].reshape(-1, *array.shape[2:]) for array in arrays] for count, arrays in zip(counts, runs, strict=True)
    ]
    return [jnp.concatenate(parts) for parts in zip(*by_output, strict=True)]


def check_output_rows(shapes: Sequence[Shape], rows: int, grown: Sequence[Shape] | None) -> None:
    """Refuse outputs whose first axis does not count rows, or another axis does: the outputs of replicas are joined along the first.

    `grown` are their shapes for twice as many rows, if these are known.
    """
    for shape, more in zip(shapes, grown or shapes, strict=True):
        if not shape or shape[0] % rows or (grown is not None and more[:1] != (2 * shape[0],)):
            raise ValueError(
                f"predict received an output of shape {shape} for {rows} rows: outputs of several replicas are put together "
                f"by their first axis, which must count rows. Return one entry for each row, or write replicas=1."
            )
        if more[1:] != shape[1:]:
            raise ValueError(
                f"predict received an output of shape {shape} for {rows} rows, and of shape {more} for {2 * rows}: another axis than the "
                f"first counts rows as well, as in a table of all pairs of rows. A replica has such a table of its own rows alone. Return "
                f"what does not depend on the number of rows, or write replicas=1."
            )
