"""The calls of a step's programs: the program for counted divisors and the one for known divisors, on any device of the placement."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.stages import Compiled

from unisono._src import packing
from unisono._src.data.global_batch import GlobalBatch
from unisono._src.placement import Placement
from unisono._src.program_digest import digest_program
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.protocol import ReplicaComputation, State
from unisono._src.replica.same_draws import list_constant_draws
from unisono._src.step import running_sums
from unisono._src.step.call_inputs import CallInputs
from unisono._src.step.device_state import DeviceState, EmptySums
from unisono._src.step.loss_divisors import BatchDivisors, DivisorCache
from unisono._src.step.plan import ReplicaRun
from unisono._src.step.program import CallOrders, CallResult, StepProgram
from unisono._src.typed_jax import jit, map_tree
from unisono._src.typing import Arguments, PyTree, Shape
from unisono._src.xla import determinism
from unisono._src.xla.interrupts import delay_interrupts
from unisono._src.xla.programs import DeviceProgram
from unisono._src.xla.rewrite import rewrite_function, trace_as_rewritten


class ProgramCalls:
    """Calls start from the state of their device, and leave the new state there."""

    def __init__(
        self,
        name: str,
        functions: ReplicaComputation,
        placement: Placement,
        inputs: CallInputs,
        divisors: DivisorCache,
        device_state: DeviceState,
        is_recorded: bool,
    ) -> None:
        """`name` is what profiles call the programs. `is_recorded`: digests of the steps are wanted."""
        self._functions = functions
        self._placement = placement
        self._inputs = inputs
        self._divisors = divisors
        self._device_state = device_state
        self._output_shapes: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}
        # Traced once, used twice; a new function each time, since JAX caches the traces of equal functions.
        self._contribution = jit(functools.partial(functions.contribution))
        self._digests: dict[Hashable, int] = {}
        """Of the programs, where several processes train together."""
        self._traced: Hashable = None
        """What the newest program is for, by which its digest is kept."""
        note_traced = self._note_traced if placement.processes else None
        self._programs = {
            counted: DeviceProgram(
                rewrite_function(
                    StepProgram(name, functions, self._contribution, counted, placement.replicas, is_recorded),
                    placement.lead.platform,
                    note_traced,
                ),
                donate=(0,),
            )
            for counted in (False, True)
        }

    def output_shapes(self, batch: GlobalBatch, rows: int, state: State) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the outputs of a replica with this number of rows."""
        key = self._inputs.kind(batch, rows)
        if key not in self._output_shapes:
            self._output_shapes[key] = self._eval_contribution(batch, rows, state)[1]
        return self._output_shapes[key]

    def make_empty_sums(self, batch: GlobalBatch, rows: int, state: State) -> EmptySums:
        """Return empty running sums for a contribution's shapes, which are the same for every number of rows."""
        if self._functions.has_one_replica:
            return {}, {}
        places = running_sums.count_places(self._placement.replicas)
        like, _ = self._eval_contribution(batch, rows, state)
        self._functions.check_draws(lambda rows: self._list_draws(batch, rows, state), rows)
        empty = {name: np.zeros((places, size), name) for name, size in packing.measure_vectors(like).items()}
        divisors = np.zeros((places, max(1, len(self._divisors.of(batch, rows, state)))), np.float32)
        return empty, {"float32": divisors}

    def _eval_contribution(self, batch: GlobalBatch, rows: int, state: State) -> tuple[Contribution, list[jax.ShapeDtypeStruct]]:
        """Return (the contribution, the outputs) of a replica with this number of rows, in shapes."""
        return self._trace_contribution(batch, rows, state)[1]

    def _trace_contribution(self, batch: GlobalBatch, rows: int, state: State) -> tuple[ClosedJaxpr, PyTree]:
        """Return the program of a replica with this number of rows, and the shapes of what the program returns."""
        numbers = np.int32(0), np.float32(1), np.zeros(len(self._divisors.of(batch, rows, state)), np.float32)
        shapes = self._inputs.shapes(batch, rows)
        lead = self._placement.lead
        with jax.default_device(
            determinism.choose_compile_device(lead)
        ):  # as the step program is traced, which takes this trace then
            return trace_as_rewritten(self._contribution, lead.platform)(state, shapes, *numbers, self._inputs.constants())

    def _list_draws(self, batch: GlobalBatch, rows: int, state: State) -> list[Shape]:
        """Return the shapes of a replica's random numbers that are always the same. Those by which metrics break ties do no harm."""
        program, (contribution, outputs) = self._trace_contribution(batch, rows, state)
        counted = map_tree(lambda _: True, (contribution, outputs))
        metrics = [False] * len(contribution.metrics)
        return list_constant_draws(program, jax.tree.leaves((counted[0]._replace(metrics=metrics), counted[1])))

    def __call__(
        self, index: int, group: Sequence[GlobalBatch], run: ReplicaRun, divisors: BatchDivisors, orders: CallOrders
    ) -> CallResult:
        """Call a program once on a device, for replicas of this size."""
        program, args = self._prepare(index, group, run, divisors, orders)
        with delay_interrupts():
            self._device_state[index], done = program(*args)
        return done

    def digest_finishing(self, batch: GlobalBatch, end: ReplicaRun, divisors: BatchDivisors) -> int:
        """Return the digest of the program that finishes a step of several processes; it is compiled if it was not."""
        key = divisors.are_counted, self._inputs.kind(batch, end.size)
        if key not in self._digests:
            self._prepare(0, [batch], end, divisors, CallOrders())
        return self._digests[key]

    def _prepare(
        self, index: int, group: Sequence[GlobalBatch], run: ReplicaRun, divisors: BatchDivisors, orders: CallOrders
    ) -> tuple[Compiled, Arguments]:
        """Return a program that is loaded on a device, and its arguments."""
        batch = group[0]
        args = (
            self._device_state.on(index),
            self._inputs.send_numbers(index, np.int32, cast(tuple[int, ...], tuple(orders))),
            self._inputs.send_numbers(index, np.float32, (run.size / batch.rows, float(batch.counted_rows))),
            divisors.on_devices[index],
            self._inputs.constants(index),
            self._inputs.send_batches(index, group, run),
        )
        kind = self._inputs.kind(batch, run.size)
        self._traced = divisors.are_counted, kind
        program = self._programs[divisors.are_counted].find_or_load(self._placement.devices[index], kind, *args)
        return program, args

    def _note_traced(self, program: ClosedJaxpr) -> None:
        self._digests[self._traced] = digest_program(program)
