"""The functions of one replica of a model whose `train_step(state, data)` or `test_step` is overridden, and the call of such a step.

The step runs as it is written, on the replica's rows, with the optimizer's `stateless_apply` replaced [`gradient_recorder`]: the gradients that
it gets are the replica's contribution, applied once to the sum of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import keras

from unisono._src.keras_private.compiled_losses import (
    forget_added_losses,
    get_loss_tracker,
    list_loss_terms,
    list_term_trackers,
    replace_losses,
)
from unisono._src.keras_private.crops import make_crops_compilable
from unisono._src.keras_private.instances import wrap_method
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.models import overrides_method
from unisono._src.replica import overwritten
from unisono._src.replica.compiled_model import ModelComputation
from unisono._src.replica.contribution import Contribution, contribute_alone
from unisono._src.replica.gradient_recorder import GradientRecorder
from unisono._src.replica.growth import APPLIED_GRADIENTS
from unisono._src.replica.protocol import Divisor, State
from unisono._src.replica.untold_loss import UNTOLD_LOSS
from unisono._src.typing import Array, Logs, Outputs, PyTree, UserObject, is_list_or_tuple, is_tuple
from unisono._src.whole_batch import unwrap_batch

METHODS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}
OF_LOSSES = ("compute_loss_and_updates", "stateless_call", "stateless_compute_loss")
PARTS = {"train": OF_LOSSES, "evaluate": OF_LOSSES, "predict": ("stateless_call",)}
"""The methods that Keras' own steps call. Where a class overrides one, Keras' step runs as a step of the user's."""


class UserStepComputation(ModelComputation):
    """The functions of replicas that run a user step."""

    has_user_step = True

    @hide_masks()
    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, constants: Sequence[Array]
    ) -> tuple[Contribution, Sequence[Array]]:
        result_alone = self.run_alone(state, batch)
        if result_alone is not None:
            return result_alone[1], ()
        terms = self._make_terms(batch, row_fraction, divisors, as_mean=True)
        means = self._make_means()
        with replace_losses(self.model, terms.loss_functions), means.watch():
            weights, non_trainable, *slots, _ = state
            start = self._state.start_values(non_trainable, replica)
            reset = self._state.reset_metrics()
            result = run_user_step(self.model, self._mode, (weights, start, *slots, reset), batch)
        self._state.note_changed(start, result.non_trainable)
        contribution = Contribution(
            overwritten.spread_over_replicas(
                self._list_updated(result), self._weigh_gradients(result, row_fraction), replica, self._replicas
            ),
            self._state.collect_assigned(non_trainable, result.non_trainable, batch, replica),
            means.compute_changes(self.model.metrics_variables, self._batch_means, reset, result.metrics, row_fraction),
            jnp.float32(0),
            jnp.zeros(len(list_loss_terms(self.model))),
            self._weigh_logs_of(result, (weights, start, *slots), batch, row_fraction),
        )
        return contribution, ()

    @hide_masks()
    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array]
    ) -> Sequence[Divisor]:
        if self.has_one_replica:  # the user step divides by itself
            return []
        weights, non_trainable, *more = state
        terms = self._make_terms(batch, row_fraction, None)
        with replace_losses(self.model, terms.loss_functions):
            start = weights, self._state.start_values(non_trainable, replica), *more
            result = run_user_step(self.model, self._mode, start, batch)
        self._weigh_gradients(result, row_fraction)
        self._weigh_logs_of(result, start[:-1], batch, row_fraction)
        return terms.divisors

    @hide_masks()
    def run_alone(self, state: State, batch: PyTree) -> tuple[State, Contribution] | None:
        """Return (new state, what is told) of a replica alone, which needs no other replicas; None where there are others."""
        if not self.has_one_replica:
            return None
        logs, new_state = check_result(call_user_step(self.model, self._mode, state, batch), self._mode, state)
        changes = [new - old for new, old in zip(new_state[-1], state[-1], strict=True)]

        def run_step(values: list[Array]) -> tuple[list[Array], Logs]:
            logs, new_state = call_user_step(self.model, self._mode, (*state[:-1], values), batch)
            return new_state[-1], logs

        numbers = self._logs.weigh_numbers(
            logs, new_state[0] if self._mode == "train" else state[0], new_state[-1], jnp.float32(1), run_step
        )
        return new_state, contribute_alone(changes, numbers)

    def read_loss(self, part: Contribution, total: Contribution) -> Array:
        """Return the log "loss" of the step, or what the step has fed to the mean of this name, as Keras' guides do.

        One replica alone adds to the sum of the epoch: what it has fed is the difference of two sums, with their rounding.
        """
        if "loss" in part.logs:
            return part.logs["loss"]
        means = [metric for metric in self._fed_metrics if type(metric) is keras.metrics.Mean and metric.name == "loss"]
        if not means:
            return jnp.asarray(UNTOLD_LOSS)
        places = {id(variable): place for place, variable in enumerate(self.model.metrics_variables)}
        sum_place, weight_place = (places[id(variable)] for variable in means[0].variables)
        weight = total.metrics[weight_place]
        return jnp.where(weight == 0, UNTOLD_LOSS, part.metrics[sum_place] / weight)

    def gradients_of_numbers(self, state: State, batch: PyTree, row_fraction: Array, divisors: Array | None) -> dict[str, Array]:
        return {}  # the gradients that the step applies are measured themselves

    @property
    def _fed_metrics(self) -> list[keras.metrics.Metric]:
        """Return the metrics that the step feeds: the loss trackers too, where the model shows them."""
        shown = {id(variable) for variable in self.model.metrics_variables}
        trackers = [get_loss_tracker(self.model), *list_term_trackers(self.model)]
        return [*super()._fed_metrics, *(tracker for tracker in trackers if shown.issuperset(map(id, tracker.variables)))]

    def _list_updated(self, result: StepResult) -> list[keras.Variable]:
        """Return the weights that the step updates: all, or none."""
        return self.model.trainable_variables if result.gradients else []

    def _weigh_logs_of(self, result: StepResult, state: State, batch: PyTree, row_fraction: Array) -> dict[str, Array]:
        """Return the replica's contribution to the logs of a step that are numbers of rows. `state` is that before it, without the metrics."""

        def run_step(values: list[Array]) -> tuple[list[Array], Logs]:
            with replace_losses(self.model, self._make_terms(batch, row_fraction, None, as_mean=True).loss_functions):
                again = run_user_step(self.model, self._mode, (*state, values), batch)
            return again.metrics, again.logs

        return self._logs.weigh_numbers(result.logs, state[0], result.metrics, row_fraction, run_step)

    def _weigh_gradients(self, result: StepResult, row_fraction: Array) -> list[Array]:
        """Return the replica's contribution to the gradients that a user step applies, from those on the replica's rows."""
        gradients = result.gradients
        positions = [
            position
            for position, (variable, gradient) in enumerate(zip(self._list_updated(result), gradients, strict=True))
            if jnp.issubdtype(gradient.dtype, jnp.floating) and not overwritten.is_overwritten_by_gradient(variable)
        ]
        if not positions:
            return gradients
        floats = [gradients[position].astype(jnp.float32) for position in positions]
        weighted = dict(zip(positions, self.growth.weigh_arrays(APPLIED_GRADIENTS, floats, row_fraction), strict=True))
        return [weighted.get(position, gradient) for position, gradient in enumerate(gradients)]


class StepResult(NamedTuple):
    """The result of a step on a replica's rows."""

    gradients: list[Array]
    """Empty where the step makes no update."""
    non_trainable: list[Array]
    metrics: list[Array]
    logs: Logs


def is_user_step(model: keras.Model, mode: str) -> bool:
    """Return whether the model's class overrides the step of this mode, or a method that it calls."""
    return mode in METHODS and any(overrides_method(model, name) for name in (METHODS[mode], *PARTS[mode]))


def call_user_step(model: keras.Model, mode: str, state: State, batch: PyTree) -> UserObject:
    """Return the result of the user step. Losses of earlier traces are forgotten before it runs."""
    forget_added_losses(model)
    with make_crops_compilable(model):
        return getattr(model, METHODS[mode])(state, unwrap_batch(batch))


def run_user_step(model: keras.Model, mode: str, state: State, batch: PyTree) -> StepResult:
    """Run a user step of training or evaluation on a replica's rows."""
    if mode == "evaluate":
        logs, (_, non_trainable, metrics) = check_result(call_user_step(model, mode, state, batch), mode, state)
        return StepResult([], non_trainable, metrics, dict(logs or {}))
    recorder = GradientRecorder(state[0], state[2])
    with wrap_method(model.optimizer, "stateless_apply", lambda _: recorder):
        logs, (weights, non_trainable, slots, metrics) = check_result(call_user_step(model, mode, state, batch), mode, state)
    return StepResult(recorder.check_returned(weights, slots), non_trainable, metrics, dict(logs or {}))


def run_predict_step(model: keras.Model, state: State, batch: PyTree) -> tuple[Outputs, list[Array]]:
    """Return (outputs, the non-trainable variables' values) of a `predict_step`."""
    returned = call_user_step(model, "predict", state, batch)
    is_pair = is_tuple(returned) and len(returned) == 2 and is_list_or_tuple(returned[1])
    if not (is_pair and len(returned[1]) == len(state[1])):
        what = f"a state of {len(returned[1])} arrays in place of {len(state[1])}" if is_pair else type(returned).__name__
        raise ValueError(
            f"predict_step must return outputs and state, as Keras' step on JAX does, and returned {what}. End it with: return outputs, "
            f"non_trainable_variables"
        )
    return returned[0], list(returned[1])


def check_result(returned: UserObject, mode: str, state: State) -> tuple[Logs | None, tuple[list[Array], ...]]:
    """Return the result of a step, if it is (logs, groups as long as those of the state); else refuse it."""
    what = type(returned).__name__
    if is_tuple(returned) and len(returned) == 2 and is_list_or_tuple(returned[1]):
        groups = returned[1]
        sizes = [len(group) if is_list_or_tuple(group) else None for group in groups]
        expected = list(map(len, state))
        if sizes == expected:
            return returned[0], tuple(map(list, groups))
        what = f"groups of {format_sizes(sizes)} arrays as its state, in place of {format_sizes(expected)}"
    names = [
        "trainable_variables",
        "non_trainable_variables",
        *["optimizer_variables"] * (len(state) == 4),
        "metrics_variables",
    ]
    raise ValueError(
        f"{METHODS[mode]} must return logs and state, as Keras' steps on JAX do, and returned {what}. End it with: return logs, "
        f"({', '.join(names)})"
    )


def format_sizes(sizes: Sequence[int | None]) -> str:
    """Return sizes of groups in words; None stands for what is no group."""
    return ", ".join("no" if size is None else str(size) for size in sizes)
