"""Steps that are not compiled: Python calls each replica's functions with arrays, and JAX runs one operation after another.

That is for breakpoints, prints and values that are known in `call`, in a loss or in replica code, and for code that cannot be compiled. All
replicas of a process run on its first device. Sums and rules are those of compiled steps; last bits are not, since XLA fuses operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.data.global_batch import GlobalBatch, global_batch, sent
from unisono._src.exchange.protocol import Exchange
from unisono._src.placement import Placement
from unisono._src.processes.progress import current
from unisono._src.replica.protocol import Functions, State
from unisono._src.step.constants import Numbers
from unisono._src.step.plan import Plan, Run, Shard, plan
from unisono._src.step.probe_schedule import Looks
from unisono._src.step.program import as_before
from unisono._src.step.replica_sums import Sum
from unisono._src.step.step import Carried, Output

NO_COPIES = 1 << 30
"""More references than anybody can hold: a state that no program writes into need not be copied."""


class EagerProgram:
    """A function that is called as a `Program` is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, device: jax.Device, key: Hashable, *args: Any) -> Any:
        with jax.default_device(device):
            return self._function(*args)


class Given(NamedTuple):
    """What a step is given beside the state."""

    batch: GlobalBatch
    now: Plan
    carried: Sequence[Carried]
    constants: list[Any]

    def share(self, rows: int) -> float:
        """Of a replica with this many rows."""
        return rows / self.batch.rows

    def rows_of_replicas(self, lead: jax.Device) -> dict[int, Any]:
        """What each replica gets: its rows, or (rows, values) where values of an earlier step are carried over."""
        rows = {s.replica: sent([self.batch], s.rows, (len(s.rows),), lead) for s in self.now.shards}
        if not self.carried:
            return rows
        for part in self.now.parts:
            for run in part.runs:
                values = jax.device_put([value.on(part.device, run) for value in self.carried], lead)
                for number in range(run.count):
                    replica = run.first + number
                    rows[replica] = rows[replica], [value[number] for value in values]
        return rows

    def shapes(self, size: int) -> Any:
        """What a replica of `size` rows gets, in shapes."""
        rows = self.batch.shapes(size)
        return (rows, [value.shapes(size) for value in self.carried]) if self.carried else rows


class EagerStep:
    """What a `Step` is, of functions that are called with arrays."""

    says_more = True

    def __init__(self, functions: Functions, placement: Placement, exchange: Exchange) -> None:
        """`placement` and `exchange` have one device in each process."""
        self._functions = functions
        self._placement = placement
        self._plans = functools.cache(functools.partial(plan, placement=placement))
        self._numbers = Numbers()
        self._sum, self._sum_of_divisors = Sum(placement, exchange), Sum(placement, exchange)
        self._divisors: dict[Hashable, list[float | None]] = {}
        """What a replica adds to each divisor, by its rows; None where masks or weights decide."""
        self._shapes_in_trace: Callable[[int], list[jax.ShapeDtypeStruct]] = lambda rows: []
        self._output_shapes: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}
        self._looks = Looks(are_repeated=False)  # each calls the user's code, which may stop there or print
        self._state: State = ()

    def __call__(self, state: State, batches: Sequence[Any], constants: Sequence[Any] = ()) -> tuple[dict[str, Any], State]:
        """The logs after the last of the batches, and the state."""
        return self.outputs(state, [global_batch(batch) for batch in batches], constants)[0], self._state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[Any] = (), carried: Sequence[Carried] = ()
    ) -> tuple[dict[str, Any], list[Output]]:
        """The logs and the replicas' outputs of the last of the batches; the state is then that of `self.state`."""
        lead, logs, outputs = self._placement.lead, {}, []
        self._state = tuple(jax.device_put([list(group) for group in state], lead))
        constants = list(jax.device_put(list(constants), lead))
        with jax.default_device(lead):
            for batch in batches:
                logs, outputs = self._step(Given(batch, self._plans(batch.rows, batch.sizes), carried, constants))
        return logs, outputs

    @property
    def state(self) -> State:
        """The newest state; nothing before the first step."""
        return self._state

    def holds(self, array: Any) -> int:
        """How many references to an array of the state may be there without harm."""
        return NO_COPIES

    def output_shapes(self, batch: GlobalBatch, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Of what a replica of `rows` rows gives back."""
        key = rows, batch.signature
        if key not in self._output_shapes:  # no replica of this process has as many
            self._output_shapes[key] = self._shapes_in_trace(rows)
        return self._output_shapes[key]

    def forget(self) -> None:
        """Lets go of the state."""
        self._state = ()

    def _step(self, given: Given) -> tuple[dict[str, Any], list[Output]]:
        rows = given.rows_of_replicas(self._placement.lead)
        divisors = self._total_divisors(given, rows)
        if self._looks.is_due(self._functions.is_undecided):
            self._functions.look(self._state, given.batch.tree(), given.now.rows_of_replicas, given.constants)
        self._looks.note_trained(1)
        by_itself = self._functions.alone_by_itself(self._state, rows[0]) if self._functions.alone else None
        if by_itself is not None:
            self._state = as_before(by_itself[0], self._state)
            return self._functions.results(self._state) | by_itself[1], []
        contributions, outputs = {}, {}
        for shard in given.now.shards:
            numbers = self._numbers_of(shard, given)
            found = self._functions.contribution(self._state, rows[shard.replica], *numbers, divisors, given.constants)
            contributions[shard.replica], outputs[shard.replica] = found
        self._note_shapes(given, divisors, outputs)
        logs = self._finish(given, divisors, contributions)
        return logs, outputs_of_runs(given.now, outputs, self._placement.replicas)

    def _finish(self, given: Given, divisors: Any, contributions: dict[int, Any]) -> dict[str, Any]:
        now, lead = given.now, self._placement.lead
        like = next(iter(contributions.values()), None)
        if like is None:
            like = self._in_shapes(self._functions.contribution, given, now.sizes[0], divisors, given.constants)[0]
        total = self._sum(contributions, now, like, given.batch)[0]
        rows, present = self._numbers.on(lead, np.float32, given.batch.rows), self._numbers.on(lead, np.int32, now.present)
        new, disagree = self._functions.finished(self._state, total, rows, present)
        self._functions.check(disagree)
        self._state = as_before(new, self._state)
        current().another_step_finished()
        return self._functions.results(self._state) | total.logs

    def _total_divisors(self, given: Given, rows: dict[int, Any]) -> Any:
        """By what each loss term of the global batch is divided."""
        found = {s.replica: as_vector(self._divisors_of(s, given, rows[s.replica])) for s in given.now.shards}
        like = next(iter(found.values()), None)
        if like is None:
            vector = lambda *args: as_vector(self._functions.divisors(*args))  # noqa: E731
            like = self._in_shapes(vector, given, given.now.sizes[0], given.constants)
        return self._sum_of_divisors(found, given.now, like, given.batch)[0]

    def _divisors_of(self, shard: Shard, given: Given, rows: Any) -> Sequence[Any]:
        """What a replica adds to each divisor. Where shapes decide, that is asked for once, since it takes a forward pass."""
        kind = len(shard.rows), given.batch.signature
        found: Sequence[Any] | None = self._divisors.get(kind)
        if found is None or None in found:
            found = self._functions.divisors(self._state, rows, *self._numbers_of(shard, given), given.constants)
            self._divisors[kind] = [0.0 if d is None else d if isinstance(d, float) else None for d in found]
        return found

    def _numbers_of(self, shard: Shard, given: Given) -> tuple[Any, Any]:
        """(the replica's number, its share of the rows)."""
        lead, size = self._placement.lead, len(shard.rows)
        return self._numbers.on(lead, np.int32, shard.replica), self._numbers.on(lead, np.float32, given.share(size))

    def _note_shapes(self, given: Given, divisors: Any, outputs: dict[int, Any]) -> None:
        """Of what replicas give back, by their rows."""
        contribution = self._functions.contribution
        self._shapes_in_trace = lambda rows: self._in_shapes(contribution, given, rows, divisors, given.constants)[1]
        for shard in given.now.shards:
            key = len(shard.rows), given.batch.signature
            if key not in self._output_shapes:
                self._output_shapes[key] = jax.eval_shape(list, outputs[shard.replica])

    def _in_shapes(self, function: Callable[..., Any], given: Given, size: int, *more: Any) -> Any:
        """What a replica of `size` rows would return, where none of this process has them."""
        return jax.eval_shape(function, self._state, given.shapes(size), np.int32(0), np.float32(1), *more)


def outputs_of_runs(now: Plan, outputs: dict[int, Any], replicas: int) -> list[Output]:
    """Return what replicas gave back, of neighbours behind one another, with room for all, as compiled steps leave it."""

    def stacked(run: Run) -> Any:
        of_replicas = [outputs[replica] for replica in range(run.first, run.first + run.count)]
        return jax.tree.map(
            lambda *arrays: jnp.stack([*arrays, *[jnp.zeros_like(arrays[0])] * (replicas - run.count)]), *of_replicas
        )

    return [Output(part.device, run, stacked(run)) for part in now.parts for run in part.runs]


def as_vector(divisors: Sequence[Any]) -> Any:
    """Return the divisors as an array; of none, one that is not read."""
    return jnp.array([0.0 if divisor is None else divisor for divisor in divisors] or [0.0], jnp.float32)
