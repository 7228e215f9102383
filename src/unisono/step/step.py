"""The step behind fit and evaluate: state and a global batch in, state and logs out."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from unisono import keras_seam
from unisono.data.division import Divided, divided
from unisono.exchange.base import Exchange
from unisono.placement import Placement
from unisono.replica.contribution import Contribution
from unisono.replica.program import ReplicaFunctions, scaling_variables
from unisono.step import finish
from unisono.step.copies import Copies, Numbers
from unisono.step.divisors import Divisors
from unisono.step.replicas import INPUTS, Sum, numbers_of
from unisono.xla.programs import Program

State = tuple[list[Any], ...]


class Step:
    """One training or evaluation step of a compiled, built model on a placement.

    It counts the divisors, runs the replicas where the placement says, adds up what they contribute, and finishes on every
    device that has the total.
    """

    def __init__(self, model: Any, placement: Placement, exchange: Exchange, training: bool) -> None:
        self.training = training
        self.state_names = keras_seam.STATE_NAMES if training else keras_seam.WITHOUT_OPTIMIZER
        self._model = model
        self._placement = placement
        self._mode = "train" if training else "evaluate"
        self._functions = ReplicaFunctions(model, alone=placement.replicas == 1)
        self._numbers = Numbers()
        self._divisors = Divisors(self._functions, placement, exchange, self._numbers, training)
        self._groups = {name: Copies(placement.devices) for name in self.state_names}
        self._scale = Copies(placement.devices)
        self._replica = Program(self._functions.train if training else self._functions.evaluate)
        self._sum = Sum(placement, exchange)
        self._finish: Program | None = None

    def __call__(self, state: State, batch: Any) -> tuple[dict[str, Any], State]:
        parts = divided(batch, self._placement)
        groups = dict(zip(self.state_names, state, strict=True))
        if self._finish is None:
            self._functions.look_at_metrics(state[0], state[1], parts.on_host())
        inputs = [
            [self._groups[name].on(index, groups[name]) for name in INPUTS] for index in range(len(self._placement.devices))
        ]
        tracked = self._groups["metrics_variables"].on(0, groups["metrics_variables"]) if self._functions.alone else []
        totals = self._sum(partial(self._run, inputs, tracked, self._scales(groups), self._divisors(inputs, parts), parts))
        return self._finished(groups, parts, totals)

    def _run(
        self,
        inputs: list[Any],
        tracked: list[Any],
        scales: list[Any],
        divisors: list[Any],
        parts: Divided,
        device: int,
        replica: int,
    ) -> Contribution | None:
        """One replica on its device; None where it has no rows."""
        if replica >= len(parts.rows):
            return None
        where = self._placement.devices[device]
        numbers = numbers_of(self._numbers, where, parts, replica)
        args = (*inputs[device], tracked, scales[device], parts.shards[replica], *numbers, divisors[device])
        return self._replica(where, parts.keys[replica], *args)

    def _scales(self, groups: dict[str, list[Any]]) -> list[list[Any]]:
        """The optimizer's loss scale on each device, where it has one: all of its state that replicas need."""
        scale = []
        if self.training:
            variables = self._model.optimizer.variables
            scaling = {id(v) for v in scaling_variables(self._model.optimizer)}
            values = zip(variables, groups["optimizer_variables"], strict=True)
            scale = [value for variable, value in values if id(variable) in scaling]
        return [self._scale.on(index, scale) for index in range(len(self._placement.devices))]

    def _finished(self, groups: dict[str, list[Any]], parts: Divided, totals: dict[int, Any]) -> tuple[dict[str, Any], State]:
        if self._finish is None:
            how = finish.finish_training if self.training else finish.finish_evaluation
            self._finish = Program(partial(how, self._functions))
        results = {}
        for home, total in totals.items():
            device = self._placement.devices[home]
            state = tuple(copies.on(home, groups[name]) for name, copies in self._groups.items())
            rows = self._numbers.on(device, np.float32, parts.total_rows)
            present = self._numbers.on(device, np.int32, len(parts.rows))
            results[home] = self._finish(device, None, state, total, rows, present)
        new = tuple(
            copies.computed({home: state[position] for home, (state, _, _) in results.items()})
            for position, copies in enumerate(self._groups.values())
        )
        _, logs, disagree = results[0]
        finish.check_counters(self._functions, self._mode, disagree)
        return logs, new

    def forget(self) -> None:
        """Lets go of the copies on the devices; the next step sends them again."""
        for copies in self._groups.values():
            copies.forget()
