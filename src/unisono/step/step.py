"""The steps behind fit, evaluate and predict: state and a global batch in, state and logs out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono import keras_seam
from unisono.data.division import Divided, divided
from unisono.exchange.base import Exchange
from unisono.placement import Placement
from unisono.replica.program import ReplicaFunctions, scaling_variables
from unisono.step import finish
from unisono.step.copies import Copies, Numbers
from unisono.step.replicas import Sum
from unisono.xla.programs import Program

Logs = dict[str, Any]


class Step:
    """What training and evaluation share: counting the divisors, running the replicas, finishing on every home."""

    training: bool

    def __init__(self, model: Any, placement: Placement, exchange: Exchange) -> None:
        self.model = model
        self.placement = placement
        self.exchange = exchange
        self.functions = ReplicaFunctions(model)
        self.sum = Sum(placement, exchange)
        self.numbers = Numbers()
        self.divisors = Divisors(self.functions, placement, exchange, self.training, self.numbers)
        self.groups = tuple(Copies(placement.devices) for _ in self.state_names)
        self._finish: Program | None = None

    state_names: tuple[str, ...]

    def __call__(self, state: tuple[list[Any], ...], batch: Any) -> tuple[Logs, tuple[list[Any], ...]]:
        parts = divided(batch, self.placement)
        if self._finish is None and self.placement.replicas > 1:
            self.functions.look_at_metrics(state[0], state[1], parts.on_host())
        totals = self.sum(self.run_replica(state, parts))
        return self.finish(state, parts, totals)

    def on(self, device: int, state: tuple[list[Any], ...], *names: str) -> list[list[Any]]:
        """Groups of the state on a device."""
        positions = [self.state_names.index(name) for name in names or self.state_names]
        return [self.groups[position].on(device, state[position]) for position in positions]

    def run_replica(self, state: Any, parts: Divided) -> Callable[[int, int], Any | None]:
        raise NotImplementedError  # by the two steps below

    def finish(self, state: Any, parts: Divided, totals: dict[int, Any]) -> tuple[Logs, Any]:
        if self._finish is None:
            how = finish.finish_training if self.training else finish.finish_evaluation
            assigned = self.functions.findings[self.training].assigned
            self._finish = Program(partial(how, self.model, assigned))
        results = {}
        for home, total in totals.items():
            device = self.placement.devices[home]
            rows = self.numbers.on(device, np.float32, parts.total_rows)
            present = self.numbers.on(device, np.int32, len(parts.rows))
            results[home] = self._finish(device, None, tuple(self.on(home, state)), total, rows, present)
        new = tuple(
            copies.computed({home: result[0][position] for home, result in results.items()})
            for position, copies in enumerate(self.groups)
        )
        _, logs, disagree = results[0]
        if any(map(bool, disagree)):
            raise ValueError(
                "The replicas of one step left different values in an integer variable of the model: "
                f"{', '.join(self.counters(disagree))}. An integer that the forward pass assigns must not depend on the rows."
            )
        return logs, new

    def counters(self, disagree: list[Any]) -> list[str]:
        variables = [self.model.non_trainable_variables[i] for i in self.functions.findings[self.training].assigned]
        counters = [v for v in variables if jnp.issubdtype(v.dtype, jnp.integer) and v.name != "seed_generator_state"]
        return [repr(v.path) for v, different in zip(counters, disagree, strict=True) if different]


class TrainStep(Step):
    training = True
    state_names = keras_seam.STATE_NAMES

    def __init__(self, model: Any, placement: Placement, exchange: Exchange) -> None:
        super().__init__(model, placement, exchange)
        self._replica = Program(self.functions.train)
        optimizer = model.optimizer
        self._scaling = [
            index for index, v in enumerate(optimizer.variables) if any(v is s for s in scaling_variables(optimizer))
        ]
        self._scale = Copies(placement.devices)

    def run_replica(self, state: Any, parts: Divided) -> Callable[[int, int], Any | None]:
        inputs = [
            self.on(index, state, "trainable_variables", "non_trainable_variables")
            for index in range(len(self.placement.devices))
        ]
        scale = [state[2][index] for index in self._scaling]
        divisors = self.divisors(inputs, parts)

        def run(device: int, replica: int) -> Any | None:
            if replica >= len(parts.rows):
                return None
            weights, others = inputs[device]
            where = self.placement.devices[device]
            return self._replica(
                where, parts.keys[replica], weights, others, self._scale.on(device, scale), parts.shards[replica],
                *numbers_of(self.numbers, where, parts, replica), divisors[device],
            )  # fmt: skip

        return run


class EvaluateStep(Step):
    training = False
    state_names = tuple(name for name in keras_seam.STATE_NAMES if name != "optimizer_variables")

    def __init__(self, model: Any, placement: Placement, exchange: Exchange) -> None:
        super().__init__(model, placement, exchange)
        self._replica = Program(self.functions.evaluate)

    def run_replica(self, state: Any, parts: Divided) -> Callable[[int, int], Any | None]:
        inputs = [
            self.on(index, state, "trainable_variables", "non_trainable_variables")
            for index in range(len(self.placement.devices))
        ]
        divisors = self.divisors(inputs, parts)

        def run(device: int, replica: int) -> Any | None:
            if replica >= len(parts.rows):
                return None
            weights, others = inputs[device]
            where = self.placement.devices[device]
            return self._replica(
                where, parts.keys[replica], weights, others, parts.shards[replica],
                *numbers_of(self.numbers, where, parts, replica), divisors[device],
            )  # fmt: skip

        return run


def share(parts: Divided, replica: int) -> float:
    """The replica's share of the rows of the global batch."""
    return parts.rows[replica] / parts.total_rows


def numbers_of(numbers: Numbers, device: jax.Device, parts: Divided, replica: int) -> tuple[jax.Array, jax.Array]:
    """(the replica's number, its share of the rows) as its program takes them."""
    return numbers.on(device, np.int32, replica), numbers.on(device, np.float32, share(parts, replica))


class Divisors:
    """The divisor of each loss term, counted over the whole global batch before the backward pass."""

    def __init__(
        self, functions: ReplicaFunctions, placement: Placement, exchange: Exchange, training: bool, numbers: Numbers
    ) -> None:
        self._functions = functions
        self._numbers = numbers
        self._placement = placement
        self._training = training
        self._by_shape: dict[Any, list[Any]] = {}
        self._count = Program(self._counted)
        self._sum = Sum(placement, exchange)
        self._copies = Copies(placement.devices)

    def __call__(self, inputs: list[list[list[Any]]], parts: Divided) -> list[Any]:
        """For each device, the divisors of the loss terms as one array."""
        of_replicas = [self._of_shape(inputs[0], parts, replica) for replica in range(len(parts.rows))]
        if any("counted" in divisors for divisors in of_replicas):
            totals = self._sum(partial(self._run, inputs, parts))
            if len(totals) == len(self._placement.devices):
                return list(totals.values())
            return [self._copies.on(index, [totals[0]])[0] for index in range(len(self._placement.devices))]
        sums = tuple(sum(column) for column in zip(*of_replicas, strict=True))
        return [self._numbers.on(device, np.float32, sums) for device in self._placement.devices]

    def _of_shape(self, state: list[list[Any]], parts: Divided, replica: int) -> list[Any]:
        """The divisors on rows of this shape, where the shape decides them; "counted" stands for the others."""
        key = parts.keys[replica]
        if key not in self._by_shape:

            def look(*args: Any) -> None:
                found = self._functions.divisors(*args, training=self._training)
                self._by_shape[key] = [
                    0.0 if divisor is None else divisor if isinstance(divisor, float) else "counted" for divisor in found
                ]

            jax.eval_shape(look, *state, parts.shards[replica], np.int32(replica), np.float32(share(parts, replica)))
        return self._by_shape[key]

    def _counted(self, *args: Any) -> Any:
        found = self._functions.divisors(*args, training=self._training)
        return jnp.stack([jnp.float32(0 if divisor is None else divisor) for divisor in found])

    def _run(self, inputs: list[Any], parts: Divided, device: int, replica: int) -> Any | None:
        if replica >= len(parts.rows):
            return None
        where = self._placement.devices[device]
        args = (*inputs[device], parts.shards[replica], *numbers_of(self._numbers, where, parts, replica))
        return self._count(where, parts.keys[replica], *args)


class PredictStep:
    """Outputs of every row, in order."""

    def __init__(self, model: Any, placement: Placement) -> None:
        self.placement = placement
        self._replica = Program(ReplicaFunctions(model).predict)
        self._groups = Copies(placement.devices), Copies(placement.devices)
        self._join = Program(joined)
        self._numbers = Numbers()

    def __call__(self, state: tuple[list[Any], ...], batch: Any) -> tuple[Any, tuple[list[Any], ...]]:
        parts, outputs = divided(batch, self.placement), []
        for replica in range(len(parts.rows)):
            device = self.placement.device_of[replica]
            weights, others = (copies.on(device, group) for copies, group in zip(self._groups, state, strict=True))
            where = self.placement.devices[device]
            args = (weights, others, parts.shards[replica], self._numbers.on(where, np.int32, replica))
            outputs.append(self._replica(where, parts.keys[replica], *args))
            if self.placement.replicas > 1:
                check_rows(outputs[-1], parts.rows[replica])
        outputs = jax.device_put(outputs, self.placement.lead)
        return self._join(self.placement.lead, tuple(parts.keys), outputs), state


def joined(outputs: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def check_rows(outputs: Any, rows: int) -> None:
    """The outputs of replicas are put together row by row, so each needs rows."""
    for leaf in jax.tree.leaves(outputs):
        if not leaf.ndim or leaf.shape[0] % rows:
            raise ValueError(
                f"predict received an output of shape {leaf.shape} for {rows} rows: outputs of several replicas are put together "
                f"by their first axis, which must count rows. Return one entry for each row, or write replicas=1."
            )
