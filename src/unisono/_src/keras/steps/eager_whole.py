"""Steps of a model that are not compiled.

Python calls the model's step with the whole batch, as plain Keras does. This is for breakpoints, prints and values that are known
in `call` or in a loss, and for code that cannot be compiled. Each process computes the whole batch on its first device. So
nothing is cut into shards: layers whose statistics are a replica's own see all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.on_lead import LeadExchange
from unisono._src.engine.global_batch import GlobalBatch, send_rows
from unisono._src.engine.state import State
from unisono._src.engine.step.observer import StepObserver, join_words
from unisono._src.engine.step.plan import plan_batch
from unisono._src.engine.step.program import keep_dtypes
from unisono._src.engine.step.run_outputs import RunOutput
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.keras.steps.totals import ReplicaSum
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typed_jax import device_put, eval_shape
from unisono._src.typing import AnyArray, Logs


class EagerWholeStep:
    """A step whose function is called with arrays. It has the interface of `Step`."""

    has_own_logs = True

    def __init__(
        self, function: ModelStep, placement: Placement, exchange: LeadExchange, observers: Sequence[StepObserver] = ()
    ) -> None:
        """Prepare the steps. `placement` and `exchange` have one device in each process."""
        self._function = function
        self._placement = placement
        self._observers = observers
        self._plans = functools.cache(functools.partial(plan_batch, placement=placement))
        self._words = ReplicaSum(exchange) if placement.processes else None
        """Sums of nothing. The integers that processes compare go along with them."""
        self.state: State = ()
        """The newest state; empty before the first step."""

    def __call__(self, state: State, batches: list[GlobalBatch]) -> tuple[Logs, State]:
        """Run steps and give the last one's logs and the state."""
        return self.outputs(state, batches)[0], self.state

    def outputs(
        self, state: State, batches: list[GlobalBatch], constants: Sequence[AnyArray] = ()
    ) -> tuple[Logs, list[RunOutput]]:
        """Run steps and give the last one's logs. There are no outputs of single replicas. The new state is then `self.state`."""
        lead = self._placement.lead
        logs: Logs = {}
        self.state = tuple(device_put([list(group) for group in state], lead))
        with jax.default_device(lead):
            for batch in batches:
                self._compare_rows(batch)
                rows = send_rows([batch], (range(batch.rows),), (batch.rows,), get_mesh((lead,)))
                new, logs = self._function(self.state, rows)
                self.state = keep_dtypes(new, self.state)
                get_activity().report_next_step()
                for observer in self._observers:
                    observer.after_steps([batch], [])
        return logs, []

    def _compare_rows(self, batch: GlobalBatch) -> None:
        """Refuse rows that differ between processes."""
        if self._words is None:
            return
        plan, nothing = self._plans(batch.rows, batch.sizes), jnp.zeros(1)
        words = join_words(self._observers, batch)
        self._words(dict.fromkeys((shard.replica for shard in plan.shards), nothing), plan, eval_shape(lambda: nothing), words)

    def forget(self) -> None:
        """Drop the state."""
        self.state = ()
