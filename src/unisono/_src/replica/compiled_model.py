"""The functions of one replica of a compiled, built model: training, evaluation, and the divisors of its losses.

State comes in and a contribution goes out; nothing is assigned.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import keras
from keras import ops

from unisono._src.keras_private.compiled_losses import (
    call_model,
    get_loss_tracker,
    list_loss_terms,
    list_metrics_without_trackers,
    list_term_trackers,
    replace_losses,
)
from unisono._src.keras_private.data_adapters import count_static_rows, unpack_batch
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.models import overrides_method
from unisono._src.keras_private.optimizers import LossScaleOptimizer
from unisono._src.keras_private.trainer_state import STATE_NAMES, WITHOUT_OPTIMIZER, RecordingScope
from unisono._src.replica import losses, metrics, optimizer_update, overwritten, state_merging, user_step
from unisono._src.replica.contribution import AssignedState, Contribution
from unisono._src.replica.growth import APPLIED_GRADIENTS, Growth
from unisono._src.replica.probe import ModelProbe
from unisono._src.replica.protocol import Divisor, State
from unisono._src.replica.replica_dependence import are_same_for_all
from unisono._src.replica.row_coupling import OutputRows, describe_shapes
from unisono._src.typed_jax import grad, vjp
from unisono._src.typing import Array, Logs, Outputs, PyTree, Values


class ModelComputation:
    """The functions that the replicas of a model run in "train" or "evaluate"."""

    def __init__(self, model: keras.Model, mode: str, replicas: int, eager: bool = False) -> None:
        """`eager`: the functions are called with arrays, one operation after another, and a probe does not compile them either."""
        self.model = model
        self.mode = mode
        self.has_one_replica = replicas == 1
        self._replicas = replicas
        self.assigned: list[int] = []
        """Positions, among the non-trainable variables, of the variables that the forward pass assigns. A trace finds them; they are the
        same for every number of rows."""
        self._batch_means: dict[int, bool] = {}
        """For the ids of metrics' variables, whether they are means of batches. `probe` finds them."""
        self.eager = eager
        self._by_rows = OutputRows(eager, self.has_one_replica)
        self.growth = Growth()
        """The growth of losses that are one number for all rows. `probe` finds it."""
        self._probe: ModelProbe | None = None

    @hide_masks()
    def contribution(
        self,
        state: State,
        batch: PyTree,
        replica: Array,
        row_fraction: Array,
        divisors: Array | None,
        constants: Sequence[Array] = (),
    ) -> tuple[Contribution, Sequence[Array]]:
        contribute = self._run_user_step if self.is_own else self._run_keras_step
        return contribute(state, batch, replica, row_fraction, divisors), ()

    @property
    def is_own(self) -> bool:
        """Return whether the model's class overrides the step of this mode."""
        return user_step.is_user_step(self.model, self.mode)

    def _run_keras_step(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None
    ) -> Contribution:
        """Return the replica's contribution to the step that Keras defines."""
        weights, non_trainable, *slots, metric_values = state
        means = metrics.BatchLevelMeans(list_metrics_without_trackers(self.model), self._by_rows)
        gradients: list[Array] = []
        training = self.mode == "train"

        def compute_loss(weights: list[Array]) -> tuple[Array, tuple[Array, Array, Outputs, list[Array], list[Array]]]:
            with means.watch():
                loss, aux = self._run_forward(weights, non_trainable, metric_values, batch, replica, row_fraction, divisors)
            return self._scale_loss(loss, slots[0]) if training else loss, (loss, *aux)

        if training:
            gradients, (loss, terms, y_pred, non_trainable_after, metrics_after) = grad(compute_loss, has_aux=True)(weights)
            gradients = [
                gradient.astype(jnp.float32) if jnp.issubdtype(gradient.dtype, jnp.floating) else gradient
                for gradient in gradients
            ]
            gradients = overwritten.spread_over_replicas(self.model.trainable_variables, gradients, replica, self._replicas)
        else:
            _, (loss, terms, y_pred, non_trainable_after, metrics_after) = compute_loss(weights)
        metric_changes, extra_logs = self._run_metrics(means, metrics_after, y_pred, batch, row_fraction)
        assigned = self._collect_assigned(non_trainable, non_trainable_after, batch, replica)
        return Contribution(gradients, assigned, metric_changes, loss, terms, extra_logs)

    @hide_masks()
    def gradients_of_numbers(self, state: State, batch: PyTree, row_fraction: Array, divisors: Array | None) -> dict[str, Array]:
        """Return the gradient of each loss that is one number for all rows, as one vector. A user step has none."""
        weights, non_trainable, *_, metric_values = state
        if self.is_own or self.mode != "train":
            return {}

        def compute_numbers(weights: list[Array]) -> dict[str, Array]:
            with self.growth.collect_losses() as numbers:
                self._run_forward(weights, non_trainable, metric_values, batch, jnp.int32(0), row_fraction, divisors)
            return numbers

        numbers, backward = vjp(compute_numbers, weights)
        cotangents = {chosen: {name: jnp.float32(name == chosen) for name in numbers} for chosen in numbers}
        return {name: concatenate_raveled(backward(cotangent)[0]) for name, cotangent in cotangents.items()}

    @hide_masks()
    def run_alone(self, state: State, batch: PyTree) -> tuple[State, dict[str, Array]] | None:
        """Return (new state, logs) of a user step of one replica alone, which needs no other replicas; else None."""
        if not (self.has_one_replica and self.is_own):
            return None
        logs, new_state = user_step.call_user_step(self.model, self.mode, state, batch)
        return new_state, self._weigh_extra_logs(logs, new_state[-1], jnp.float32(1))

    def _run_user_step(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None
    ) -> Contribution:
        """Return the replica's contribution to a user step."""
        result_alone = self.run_alone(state, batch)
        if result_alone is not None:
            return Contribution([], AssignedState([], [], []), [], jnp.float32(0), jnp.zeros(0), result_alone[1])
        model = self.model
        terms = self._make_terms(row_fraction, divisors, as_mean=True)
        means = metrics.BatchLevelMeans(self._fed_metrics, self._by_rows)
        with replace_losses(model, terms.loss_functions), means.watch():
            weights, non_trainable, *slots, _ = state
            start = self._start_values(non_trainable, replica)
            reset = self._reset_values()
            result = user_step.run_user_step(model, self.mode, (weights, start, *slots, reset), batch)
        self._note_changed(start, result.non_trainable)
        variables = model.trainable_variables if result.gradients else []
        gradients = self._weigh_gradients(variables, result.gradients, row_fraction)
        return Contribution(
            overwritten.spread_over_replicas(variables, gradients, replica, self._replicas),
            self._collect_assigned(non_trainable, result.non_trainable, batch, replica),
            self._metric_changes(means, reset, result.metrics, row_fraction),
            jnp.float32(0),
            jnp.zeros(len(list_loss_terms(model))),
            self._weigh_extra_logs(result.logs, result.metrics, row_fraction),
        )

    @property
    def _fed_metrics(self) -> list[keras.metrics.Metric]:
        """Return the metrics that the step feeds. A user step feeds the loss trackers too."""
        trackers = [get_loss_tracker(self.model), *list_term_trackers(self.model)] if self.is_own else []
        shown = {id(variable) for variable in self.model.metrics_variables}
        shown_trackers = (tracker for tracker in trackers if shown.issuperset(map(id, tracker.variables)))
        return [*list_metrics_without_trackers(self.model), *shown_trackers]

    def _weigh_gradients(self, variables: list[keras.Variable], gradients: list[Array], row_fraction: Array) -> list[Array]:
        """Return the replica's contribution to the gradients that a user step applies, from those on the replica's rows."""
        positions = [
            position
            for position, (variable, gradient) in enumerate(zip(variables, gradients, strict=True))
            if jnp.issubdtype(gradient.dtype, jnp.floating) and not overwritten.is_overwritten_by_gradient(variable)
        ]
        if not positions:
            return gradients
        floats = [gradients[position].astype(jnp.float32) for position in positions]
        weighted = self.growth.weigh_arrays(APPLIED_GRADIENTS, floats, row_fraction)
        return [dict(zip(positions, weighted, strict=True)).get(position, old) for position, old in enumerate(gradients)]

    @hide_masks()
    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array] = ()
    ) -> Sequence[Divisor]:
        weights, non_trainable, *slots, metric_values = state
        terms = self._make_terms(row_fraction, None)
        training = self.mode == "train"
        if self.is_own:
            if self.has_one_replica:  # the user step divides by itself
                return []
            with replace_losses(self.model, terms.loss_functions):
                start = weights, self._start_values(non_trainable, replica), *slots, metric_values
                result = user_step.run_user_step(self.model, self.mode, start, batch)
            self._weigh_gradients(self.model.trainable_variables if result.gradients else [], result.gradients, row_fraction)
            self._weigh_extra_logs(result.logs, result.metrics, row_fraction)
            return terms.divisors
        with self._open_scope(weights, non_trainable, None, replica):
            x, y, sample_weight = unpack_batch(batch)
            y_pred = call_model(self.model, x, training)
            losses.compute_loss_contribution(self.model, x, y, y_pred, sample_weight, training, terms)
        if overrides_method(self.model, "compute_metrics"):  # its logs may hold numbers that no metric gives
            means = metrics.BatchLevelMeans(list_metrics_without_trackers(self.model), self._by_rows)
            self._run_metrics(means, metric_values if self.has_one_replica else self._reset_values(), y_pred, batch, row_fraction)
        return terms.divisors

    @hide_masks()
    def finish_step(self, state: State, total: Contribution, rows: Array, present: Array) -> tuple[State, list[Array]]:
        weights, non_trainable, *slots, metric_values = state
        if total.gradients:
            gradients = overwritten.take_largest_gradients(
                self.model.trainable_variables, weights, total.gradients, self._replicas
            )
            weights, slots[0] = optimizer_update.apply_gradients(self.model.optimizer, slots[0], gradients, weights)
        non_trainable, disagree = self._merge_assigned(non_trainable, total.assigned, rows, present)
        new_values = optimizer_update.add_to_metrics(metric_values, total.metrics, self.has_one_replica)
        metric_values = new_values if self.is_own else optimizer_update.track_losses(self.model, new_values, total, rows)
        return (weights, non_trainable, *slots, metric_values), disagree

    @hide_masks()
    def results(self, state: State) -> Logs:
        return optimizer_update.compute_logs(self.model, state[0], state[-1])

    def read(self) -> list[bool]:
        """Return, for each group of the state, whether replicas read it. A user step may read all of the state."""
        groups = STATE_NAMES if self.mode == "train" else WITHOUT_OPTIMIZER
        return [self.is_own or name in ("trainable_variables", "non_trainable_variables") for name in groups]

    def scales(self) -> list[tuple[int, int]]:
        if self.mode != "train":
            return []
        scales = {id(variable) for variable in list_loss_scales(self.model.optimizer)}
        return [(2, index) for index, variable in enumerate(self.model.optimizer.variables) if id(variable) in scales]

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        """Find out how the user's numbers and metrics are merged."""
        user_metrics = metrics.find_unproven_metrics(self._fed_metrics)
        if self.has_one_replica or not (user_metrics or self.growth.number_names):
            return False
        if self._probe is None:
            self._probe = ModelProbe(self, user_metrics)
        before = self.growth.decision_count, self._batch_means
        assigned = self.assigned  # by a step in training, not by the steps of the probe
        try:
            self._probe.at(state, batch, shards, self._reset_values())
        finally:
            self.assigned = assigned
        self._batch_means = self._probe.batch_means
        return (self.growth.decision_count, self._batch_means) != before

    @property
    def needs_probe(self) -> bool:
        return self._probe is not None

    @property
    def is_undecided(self) -> bool:
        return self._probe is not None and self._probe.is_undecided

    def check(self, disagree: list[Array]) -> None:
        state_merging.check_counters(self.model.non_trainable_variables, self.assigned, disagree)

    def _make_terms(self, row_fraction: Array, divisors: Array | None, as_mean: bool = False) -> losses.LossTerms:
        as_mean = as_mean or overrides_method(self.model, "compute_loss")
        return losses.LossTerms(
            [term.loss for term in list_loss_terms(self.model)],
            row_fraction,
            self.growth,
            self._by_rows,
            divisors,
            as_mean,
        )

    def _reset_values(self) -> list[Array]:
        """Return the values of the metrics' variables after a reset."""
        return metrics.compute_reset_values(self.model.metrics, self.model.metrics_variables)

    def _open_scope(
        self, weights: list[Array], non_trainable: list[Array], metric_values: list[Array] | None, replica: Array
    ) -> RecordingScope:
        """Return a scope of the replica's state. One replica alone goes on from `metric_values`; others start from reset metrics."""
        model = self.model
        start = metric_values if self.has_one_replica and metric_values is not None else self._reset_values()
        mapping = [
            *zip(model.trainable_variables, weights, strict=True),
            *zip(model.non_trainable_variables, self._start_values(non_trainable, replica), strict=True),
            *zip(model.metrics_variables, start, strict=True),
        ]
        return RecordingScope(state_mapping=mapping, collect_losses=True)

    def _start_values(self, non_trainable: list[Array], replica: Array) -> list[Array]:
        """Return the values of the non-trainable variables from which the replica starts."""
        return state_merging.make_start_values(self.model.non_trainable_variables, non_trainable, replica)

    def _run_forward(
        self,
        weights: list[Array],
        non_trainable: list[Array],
        metric_values: list[Array],
        batch: PyTree,
        replica: Array,
        row_fraction: Array,
        divisors: Array | None,
    ) -> tuple[Array, tuple[Array, Outputs, list[Array], list[Array]]]:
        """Return (loss, (loss terms, predictions, non-trainable variables' values, metrics' values)) of the replica's rows."""
        model = self.model
        terms = self._make_terms(row_fraction, divisors)
        training = self.mode == "train"
        x, y, sample_weight = unpack_batch(batch)
        with self._open_scope(weights, non_trainable, metric_values, replica) as scope:
            y_pred = call_model(model, x, training)
            loss = losses.compute_loss_contribution(model, x, y, y_pred, sample_weight, training, terms)
            self._note_assigned(scope, (weights, non_trainable), batch)
            non_trainable_after: Values = [scope.get_current_value(variable) for variable in model.non_trainable_variables]
            metrics_after: Values = [scope.get_current_value(variable) for variable in model.metrics_variables]
        return ops.cast(loss, "float32"), (terms.values, y_pred, non_trainable_after, metrics_after)

    def _note_assigned(self, scope: RecordingScope, state: tuple[list[Array], list[Array]], batch: PyTree) -> None:
        """Note the variables that the forward pass assigned. Refuse those whose value replicas cannot agree on."""
        model = self.model
        positions = {id(variable): index for index, variable in enumerate(model.non_trainable_variables)}
        known = positions.keys() | {id(variable) for variable in model.metrics_variables}
        dropped = [variable for i, variable in scope.assigned.items() if i not in known]
        if dropped and not (self.has_one_replica or self._are_same_for_all(dropped, state, batch)):
            kind = "a trainable variable, by the rows" if dropped[0].trainable else "a variable that the model does not track"
            raise ValueError(
                f"The forward pass assigns {dropped[0].path!r}, {kind}: replicas cannot agree on its value. Trainable "
                f"state changes through gradients alone; other state must be an attribute of a layer of the model."
            )
        self.assigned = sorted(positions[i] for i in scope.assigned if i in positions)

    def _are_same_for_all(self, variables: list[keras.Variable], state: tuple[list[Array], list[Array]], batch: PyTree) -> bool:
        """Return whether the values assigned to these trainable variables are the same on all replicas, as in power iteration: they depend on
        weights and other state alone, not on the rows, their number, or a replica's random numbers. Keras drops them after the step."""
        if not all(variable.trainable for variable in variables):
            return False

        @hide_masks()
        def compute_assigned(state: tuple[list[Array], list[Array]], inputs: tuple[PyTree, Array]) -> list[Array]:
            batch, replica = inputs
            with self._open_scope(*state, None, replica) as scope:
                call_model(self.model, unpack_batch(batch)[0], self.mode == "train")
                values: Values = [scope.get_current_value(variable) for variable in variables]
                return values

        factors = (1,) if count_static_rows(self.model) is not None else (1, 2)
        shapes = [(describe_shapes(batch, factor), describe_shapes(jnp.int32(0))) for factor in factors]
        return are_same_for_all(compute_assigned, describe_shapes(state), shapes)

    def _note_changed(self, before: list[Array], after: list[Array]) -> None:
        """Note the variables that a user step has changed."""
        self.assigned = [index for index, (new, old) in enumerate(zip(after, before, strict=True)) if new is not old]

    def _scale_loss(self, loss: Array, slots: list[Array]) -> Array:
        """Return the loss as the optimizer scales it, in the optimizer state of this step."""
        optimizer = self.model.optimizer
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            return optimizer.scale_loss(loss)

    def _collect_assigned(self, before: list[Array], after: list[Array], batch: PyTree, replica: Array) -> AssignedState:
        variables = self.model.non_trainable_variables
        rows = jax.tree.leaves(batch)[0].shape[0]
        return state_merging.collect_assigned(variables, self.assigned, self.has_one_replica, before, after, rows, replica)

    def _merge_assigned(
        self, before: list[Array], total: AssignedState, rows: Array, present: Array
    ) -> tuple[list[Array], list[Array]]:
        variables = self.model.non_trainable_variables
        return state_merging.merge_assigned(variables, self.assigned, self.has_one_replica, before, total, rows, present)

    def _run_metrics(
        self, means: metrics.BatchLevelMeans, start: list[Array], y_pred: Outputs, batch: PyTree, row_fraction: Array
    ) -> tuple[list[Array], dict[str, Array]]:
        """Return (what the rows add to the metrics' variables, the logs of `compute_metrics` that no metric gives). One replica alone has
        the metrics' new state in the first place."""
        model = self.model
        variables = self.model.metrics_variables
        x, y, sample_weight = unpack_batch(batch)
        reset = self._reset_values()
        with keras.StatelessScope(state_mapping=list(zip(variables, start, strict=True))) as scope, means.watch():
            logs = model.compute_metrics(x, y, y_pred, sample_weight)
            after: Values = [scope.get_current_value(variable) for variable in variables]
        extra_logs = self._weigh_extra_logs(logs, after, row_fraction)
        return (after if self.has_one_replica else self._metric_changes(means, reset, after, row_fraction)), extra_logs

    def _metric_changes(
        self, means: metrics.BatchLevelMeans, reset: list[Array], after: list[Array], row_fraction: Array
    ) -> list[Array]:
        batch_means = dict.fromkeys(means.variables(), True) | self._batch_means
        return metrics.compute_metric_changes(self.model.metrics_variables, batch_means, reset, after, row_fraction)

    def _weigh_extra_logs(self, logs: Logs | None, after: list[Array], row_fraction: Array) -> dict[str, Array]:
        """Return the replica's contribution to the logs that no metric gives."""
        with keras.StatelessScope(state_mapping=list(zip(self.model.metrics_variables, after, strict=True))):
            metric_names = set(self.model.get_metrics_result())
        extra_logs = {
            name: ops.cast(value, "float32")
            for name, value in metrics.flatten_logs(logs or {}).items()
            if name not in metric_names
        }
        return {name: self.growth.weighted(f"the log {name!r}", value, row_fraction) for name, value in extra_logs.items()}


def list_loss_scales(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the optimizer's variables that scale the loss: none but a loss scale."""
    return [optimizer.dynamic_scale] if isinstance(optimizer, LossScaleOptimizer) else []


def concatenate_raveled(arrays: list[Array]) -> Array:
    """Return one vector of all numbers."""
    return jnp.concatenate([jnp.ravel(array).astype(jnp.float32) for array in arrays])
