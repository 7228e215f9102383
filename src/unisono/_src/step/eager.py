"""Steps that are not compiled: Python calls each replica's functions with arrays, and JAX runs one operation after another.

They are for breakpoints, prints and values that are known in `call`, in a loss or in replica code, and for code that cannot be compiled. All
replicas of a process run on its first device. Sums and rules are those of compiled steps; last bits are not, since XLA fuses operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.data.global_batch import GlobalBatch, send_rows
from unisono._src.exchange.protocol import Exchange
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.protocol import Divisor, ReplicaComputation, State
from unisono._src.step.device_numbers import DeviceNumbers
from unisono._src.step.loss_divisors import list_known_divisors
from unisono._src.step.plan import BatchPlan, ReplicaRun, Shard, plan_batch
from unisono._src.step.probe_schedule import ProbeSchedule
from unisono._src.step.program import ReplicaOutputs, keep_dtypes
from unisono._src.step.recorder import StepRecorder
from unisono._src.step.run_outputs import CarriedValue, RunOutput, describe_replica_batch
from unisono._src.step.totals import ReplicaSum
from unisono._src.typed_jax import device_put, eval_shape, map_tree
from unisono._src.typing import AnyArray, Array, Logs, PyTree


class StepInput(NamedTuple):
    """The input of a step beside the state."""

    batch: GlobalBatch
    batch_plan: BatchPlan
    carried: Sequence[CarriedValue]
    constants: list[Array]

    def rows_of_replicas(self, lead: jax.Device) -> dict[int, PyTree]:
        """Return the batch of each replica: its rows, or (rows, values) where values of an earlier step are carried over."""
        rows = {shard.replica: send_rows([self.batch], shard.rows, (len(shard.rows),), lead) for shard in self.batch_plan.shards}
        if not self.carried:
            return rows
        for part in self.batch_plan.parts:
            for run in part.runs:
                values = device_put([value.on(part.device, run) for value in self.carried], lead)
                for number in range(run.count):
                    replica = run.first + number
                    rows[replica] = rows[replica], [value[number] for value in values]
        return rows

    def shapes(self, size: int) -> PyTree:
        """Return the batch of a replica of `size` rows, in shapes."""
        return describe_replica_batch(self.batch, self.carried, size)


class EagerStep:
    """A step with the interface of `Step`, whose functions are called with arrays."""

    has_own_logs = True

    def __init__(
        self, functions: ReplicaComputation, placement: Placement, exchange: Exchange, recorder: StepRecorder | None = None
    ) -> None:
        """`placement` and `exchange` have one device in each process. `recorder` counts the steps that train."""
        self._recorder = recorder
        self._functions = functions
        self._placement = placement
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._numbers = DeviceNumbers()
        self._sum = ReplicaSum(placement, exchange)
        self._sum_of_divisors = ReplicaSum(placement, exchange)
        self._divisors: dict[Hashable, list[float | None]] = {}
        """The divisors of a replica, by its rows; None where masks or weights decide."""
        self._shapes_in_trace: Callable[[int], list[jax.ShapeDtypeStruct]] = lambda rows: []
        self._output_shapes: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}
        self._probe_schedule = ProbeSchedule(are_repeated=False)  # each probe calls user code, which may stop there or print
        self.state: State = ()
        """The newest state; empty before the first step."""

    def __call__(self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()) -> tuple[Logs, State]:
        """Return the logs after the last of the batches, and the state."""
        return self.outputs(state, batches, constants)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = (), carried: Sequence[CarriedValue] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Return the logs and the replicas' outputs of the last of the batches; the new state is then `self.state`."""
        lead = self._placement.lead
        logs = {}
        outputs = []
        self.state = tuple(device_put([list(group) for group in state], lead))
        device_constants = list(device_put(list(constants), lead))
        with jax.default_device(lead):
            for batch in batches:
                step_input = StepInput(batch, self._plans(batch.rows, batch.sizes), carried, device_constants)
                logs, outputs = self._step(step_input)
                if self._recorder is not None:
                    self._recorder.note_steps([batch], [])
        return logs, outputs

    def output_shapes(self, batch: GlobalBatch, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the outputs of a replica of `rows` rows."""
        key = rows, batch.signature
        if key not in self._output_shapes:  # no replica of this process has this number of rows
            self._output_shapes[key] = self._shapes_in_trace(rows)
        return self._output_shapes[key]

    def forget(self) -> None:
        """Drop the state."""
        self.state = ()

    def _step(self, step_input: StepInput) -> tuple[Logs, list[RunOutput]]:
        rows = step_input.rows_of_replicas(self._placement.lead)
        divisors = self._add_divisors(step_input, rows)
        if self._probe_schedule.is_due(self._functions.is_undecided):
            shards = step_input.batch_plan.rows_of_replicas
            self._functions.probe(self.state, step_input.batch.tree(), shards, step_input.constants)
        self._probe_schedule.note_trained(1)
        contributions: dict[int, Contribution] = {}
        outputs: dict[int, ReplicaOutputs] = {}
        for shard in step_input.batch_plan.shards:
            numbers = self._input_numbers(shard, step_input)
            result = self._functions.contribution(self.state, rows[shard.replica], *numbers, divisors, step_input.constants)
            contributions[shard.replica], outputs[shard.replica] = result
        self._note_output_shapes(step_input, divisors, outputs)
        logs = self._finish_step(step_input, divisors, contributions)
        return logs, stack_outputs(step_input.batch_plan, outputs, self._placement.replicas)

    def _finish_step(self, step_input: StepInput, divisors: Array, contributions: dict[int, Contribution]) -> Logs:
        batch_plan = step_input.batch_plan
        lead = self._placement.lead
        like = next(iter(contributions.values()), None)
        if like is None:
            size = batch_plan.sizes[0]
            like = self._eval_shapes(self._functions.contribution, step_input, size, divisors, step_input.constants)[0]
        total = self._sum(contributions, batch_plan, like, step_input.batch)[0]
        rows = self._numbers.on(lead, np.float32, step_input.batch.counted_rows)
        present = self._numbers.on(lead, np.int32, batch_plan.present)
        new, disagree = self._functions.finish_step(self.state, total, rows, present)
        self._functions.check(disagree)
        self.state = keep_dtypes(new, self.state)
        get_activity().report_next_step()
        return self._functions.results(self.state) | total.logs

    def _add_divisors(self, step_input: StepInput, rows: dict[int, PyTree]) -> Array:
        """Return the loss divisors of the global batch, as one vector."""
        shards = step_input.batch_plan.shards
        vectors = {s.replica: as_vector(self._divisors_of(s, step_input, rows[s.replica])) for s in shards}
        like = next(iter(vectors.values()), None)
        if like is None:

            def make_vector(*args: PyTree) -> Array:
                return as_vector(self._functions.divisors(*args))

            like = self._eval_shapes(make_vector, step_input, step_input.batch_plan.sizes[0], step_input.constants)
        return self._sum_of_divisors(vectors, step_input.batch_plan, like, step_input.batch)[0]

    def _divisors_of(self, shard: Shard, step_input: StepInput, rows: PyTree) -> Sequence[Divisor]:
        """Return the divisors of a replica. Where shapes decide, they are cached, since they take a forward pass."""
        kind = len(shard.rows), step_input.batch.signature
        divisors: Sequence[Divisor] | None = self._divisors.get(kind)
        if divisors is None or None in divisors:
            numbers = self._input_numbers(shard, step_input)
            divisors = self._functions.divisors(self.state, rows, *numbers, step_input.constants)
            self._divisors[kind] = list_known_divisors(divisors)
        return divisors

    def _input_numbers(self, shard: Shard, step_input: StepInput) -> tuple[Array, Array]:
        """Return (the replica's number, its row fraction)."""
        lead = self._placement.lead
        row_fraction = len(shard.rows) / step_input.batch.rows
        return self._numbers.on(lead, np.int32, shard.replica), self._numbers.on(lead, np.float32, row_fraction)

    def _note_output_shapes(self, step_input: StepInput, divisors: Array, outputs: dict[int, ReplicaOutputs]) -> None:
        """Note the shapes of the replicas' outputs, by their rows."""
        contribution = self._functions.contribution
        self._shapes_in_trace = lambda rows: self._eval_shapes(contribution, step_input, rows, divisors, step_input.constants)[1]
        for shard in step_input.batch_plan.shards:
            key = len(shard.rows), step_input.batch.signature
            if key not in self._output_shapes:
                self._output_shapes[key] = eval_shape(list, outputs[shard.replica])

    def _eval_shapes(self, function: Callable[..., PyTree], step_input: StepInput, size: int, *more: PyTree) -> PyTree:
        """Return the shapes of what a function returns for a replica of `size` rows, where no replica of this process has them."""
        return eval_shape(function, self.state, step_input.shapes(size), np.int32(0), np.float32(1), *more)


def stack_outputs(batch_plan: BatchPlan, outputs: dict[int, ReplicaOutputs], replicas: int) -> list[RunOutput]:
    """Return the outputs of neighbouring replicas, stacked in arrays with room for all replicas, as compiled steps leave them."""

    def stack_run(run: ReplicaRun) -> ReplicaOutputs:
        run_outputs = [outputs[replica] for replica in range(run.first, run.first + run.count)]
        return map_tree(lambda *arrays: jnp.stack([*arrays, *[jnp.zeros_like(arrays[0])] * (replicas - run.count)]), *run_outputs)

    return [RunOutput(part.device, run, stack_run(run)) for part in batch_plan.parts for run in part.runs]


def as_vector(divisors: Sequence[Divisor]) -> Array:
    """Return the divisors as an array; without divisors, an array of one element that is not read."""
    return jnp.array([0.0 if divisor is None else divisor for divisor in divisors] or [0.0], jnp.float32)
