"""The step of predict. It gives the outputs of all rows, in order, and the state after the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from unisono._src.engine.exchange.gather_rows import get_row_gatherer
from unisono._src.engine.global_batch import GlobalBatch, count_shard_rows
from unisono._src.engine.state import State
from unisono._src.engine.step.run_outputs import RunOutput
from unisono._src.engine.step.step import Step
from unisono._src.engine.xla.programs import DeviceProgram
from unisono._src.keras.steps.eager import EagerWholeStep
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.placement import Placement
from unisono._src.typed_jax import device_put, map_tree
from unisono._src.typing import Array, Outputs


class PredictStep:
    """The step of predict, from (weights, other state) and global batches. Outputs are on the lead."""

    has_own_logs = True

    def __init__(self, function: ModelStep, step: Step | EagerWholeStep, placement: Placement) -> None:
        self._function = function
        self._placement = placement
        self._step = step
        self._structures: dict[Hashable, jax.tree_util.PyTreeDef] = {}
        """The structures of the outputs, by the kinds of batches."""
        self._join_rows = functools.cache(make_row_joiner)
        self._rows_of_all = get_row_gatherer(placement) if placement.processes else None

    def __call__(self, state: State, batches: Sequence[GlobalBatch]) -> tuple[Outputs, State]:
        """Compute the outputs of all rows and the new state."""
        outputs: list[Outputs] = []
        for batch in batches:
            whole, runs = self._step.outputs(state, [batch])
            state = self._step.state
            traced = cast("jax.tree_util.PyTreeDef", self._function.structure)  # the step has set it
            structure = self._structures.setdefault(batch.signature, traced)
            rows = iter(self._collect_rows(batch, runs) if len(whole) < structure.num_leaves else [])
            names = map(str, range(structure.num_leaves))
            leaves = [whole[name] if name in whole else next(rows) for name in names]
            outputs.append(jax.tree.unflatten(structure, leaves))
        return map_tree(lambda *parts: jnp.concatenate(parts), *outputs) if len(outputs) > 1 else outputs[0], state

    @property
    def state(self) -> State:
        """The newest state, on the lead. It is empty before the first step."""
        return self._step.state

    def forget(self) -> None:
        """Drop what lies on the devices; the next step sends it again."""
        self._step.forget()

    def _collect_rows(self, batch: GlobalBatch, runs: list[RunOutput]) -> list[Array]:
        """Collect the outputs of all rows of a batch, on the lead."""
        lead = self._placement.lead
        parts = sorted((part for output in runs for part in output.list_runs()), key=lambda part: part[0].first)
        arrays = device_put([blocks for _, blocks in parts], lead)
        shapes = tuple(tuple((array.shape, array.dtype) for array in run) for run in arrays)
        counts = tuple(run.count for run, _ in parts)
        own: list[Array] = self._join_rows(counts)(lead, shapes, arrays) if runs else []
        return own if self._rows_of_all is None else self._gather_rows(batch, own)

    def _gather_rows(self, batch: GlobalBatch, own: list[Array]) -> list[Array]:
        """Gather the outputs of all processes."""
        assert self._rows_of_all is not None
        assert isinstance(self._step, Step)
        sizes = count_shard_rows(batch, self._placement.replicas)
        rows_of_last = max(filter(None, reversed(sizes)))
        like = self._step.describe_outputs(batch)(rows_of_last)
        own = own or list(device_put([jnp.zeros((0, *shape.shape[1:]), shape.dtype) for shape in like], self._placement.lead))
        process_rows = [sum(sizes[block.start : block.stop]) for block in self._placement.of_processes]
        counts = [[shape.shape[0] // rows_of_last * rows for rows in process_rows] for shape in like]
        return self._rows_of_all(own, counts)


def make_row_joiner(counts: tuple[int, ...]) -> DeviceProgram:
    """Build the program that joins the rows of runs. `counts` are the replicas of each run."""
    return DeviceProgram(functools.partial(join_rows, counts))


def join_rows(counts: Sequence[int], runs: Sequence[Sequence[Array]]) -> list[Array]:
    """Join each output to one array of rows.

    `counts` are the replicas of each run. They lie first in its arrays, behind them is unused room.
    """
    by_output = [
        [array[:count].reshape(-1, *array.shape[2:]) for array in arrays] for count, arrays in zip(counts, runs, strict=True)
    ]
    return [jnp.concatenate(parts) for parts in zip(*by_output, strict=True)]
