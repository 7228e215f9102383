"""The functions of one replica of a model whose steps are as Keras defines them: forward pass, losses, gradients, metrics."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import keras
from keras import ops

from unisono._src.keras_private.compiled_losses import call_model
from unisono._src.keras_private.data_adapters import unpack_batch
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.models import has_own_code, overrides_method
from unisono._src.keras_private.trainer_state import list_scope_values
from unisono._src.phases.coupling import sees_other_rows
from unisono._src.replica import losses, metrics, optimizer_update, overwritten
from unisono._src.replica.compiled_model import ModelComputation
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.protocol import Divisor, State
from unisono._src.replica.row_coupling import describe_shapes, warn_of_coupling, warn_of_row_tables
from unisono._src.typed_jax import eval_shape, grad, vjp
from unisono._src.typing import Array, Logs, Outputs, PyTree
from unisono._src.xla.rewrite import rewrite_before_gradient


class KerasStepComputation(ModelComputation):
    """The functions of replicas that run the step of Keras."""

    has_user_step = False

    @hide_masks()
    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, constants: Sequence[Array]
    ) -> tuple[Contribution, Sequence[Array]]:
        weights, non_trainable, *slots, metric_values = state
        means = self._make_means()
        gradients: list[Array] = []
        training = self._mode == "train"

        def compute_loss(weights: list[Array]) -> tuple[Array, tuple[Array, Array, Outputs, list[Array], list[Array]]]:
            with means.watch():
                loss, aux = self._run_forward(weights, non_trainable, metric_values, batch, replica, row_fraction, divisors)
            return self._scale_loss(loss, slots[0]) if training else loss, (loss, *aux)

        if training:
            gradients, (loss, terms, y_pred, non_trainable_after, metrics_after) = grad(
                rewrite_before_gradient(compute_loss), has_aux=True
            )(weights)
            gradients = overwritten.spread_over_replicas(
                self.model.trainable_variables, overwritten.widen_floats(gradients), replica, self._replicas
            )
        else:
            _, (loss, terms, y_pred, non_trainable_after, metrics_after) = compute_loss(weights)
        metric_changes, extra_logs = self._run_metrics(means, weights, metrics_after, y_pred, batch, row_fraction)
        assigned = self._state.collect_assigned(non_trainable, non_trainable_after, batch, replica)
        return Contribution(gradients, assigned, metric_changes, loss, terms, extra_logs), ()

    @hide_masks()
    def gradients_of_numbers(self, state: State, batch: PyTree, row_fraction: Array, divisors: Array | None) -> dict[str, Array]:
        weights, non_trainable, *_, metric_values = state
        if self._mode != "train":
            return {}

        def compute_numbers(weights: list[Array]) -> dict[str, Array]:
            with self.growth.collect_losses() as numbers:
                self._run_forward(weights, non_trainable, metric_values, batch, jnp.int32(0), row_fraction, divisors)
            return numbers

        numbers, backward = vjp(compute_numbers, weights)
        cotangents = {chosen: {name: jnp.float32(name == chosen) for name in numbers} for chosen in numbers}
        return {name: concatenate_raveled(backward(cotangent)[0]) for name, cotangent in cotangents.items()}

    @hide_masks()
    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array]
    ) -> Sequence[Divisor]:
        weights, non_trainable, *_, metric_values = state
        terms = self._make_terms(batch, row_fraction, None)
        with self._state.open_scope(weights, non_trainable, None, replica):
            y_pred, _ = self._compute_loss(batch, terms)
        if overrides_method(self.model, "compute_metrics"):  # its logs may hold numbers that no metric gives
            start = metric_values if self.has_one_replica else self._state.reset_metrics()
            self._run_metrics(self._make_means(), weights, start, y_pred, batch, row_fraction)
        # At the end: a call of the model forgets the losses that its layers have added in this trace.
        self._check_outputs(weights, non_trainable, batch, replica, y_pred)
        return terms.divisors

    def _check_outputs(
        self, weights: list[Array], non_trainable: list[Array], batch: PyTree, replica: Array, y_pred: Outputs
    ) -> None:
        """Warn of outputs of which another axis than the first counts rows. The model is traced again where an axis is as long by chance."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        shapes = [array.shape for array in jax.tree.leaves(y_pred)]
        if self.has_one_replica or self.eager or rows in self._checked_outputs or not any(rows in shape[1:] for shape in shapes):
            return
        self._checked_outputs.add(rows)

        def compute_outputs(x: PyTree) -> Outputs:
            with self._state.open_scope(weights, non_trainable, None, replica):
                return call_model(self.model, x, self._mode == "train")

        try:
            grown = eval_shape(compute_outputs, describe_shapes(unpack_batch(batch)[0], 2))
        except Exception:  # of the user's code, which was not written for more rows
            return
        warn_of_row_tables(self.model.name, rows, shapes, [array.shape for array in jax.tree.leaves(grown)])

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        self._check_rows(state, batch)
        return super().probe(state, batch, shards, constants)

    @hide_masks()
    def _check_rows(self, state: State, batch: PyTree) -> None:
        """Warn once of a model whose own code makes rows of its outputs of other rows too."""
        is_checked, self._has_checked_rows = self._has_checked_rows, True
        if is_checked or self.has_one_replica or self.eager or self._mode != "train" or not has_own_code(self.model):
            return

        def compute_outputs(state: State, x: PyTree) -> Outputs:
            weights, non_trainable = state
            with self._state.open_scope(weights, non_trainable, None, jnp.int32(0)):
                return call_model(self.model, x, False)

        if sees_other_rows(compute_outputs, state[:2], unpack_batch(batch)[0]):
            warn_of_coupling(f"The model {self.model.name!r}")

    @hide_masks()
    def finish_step(self, state: State, total: Contribution, rows: Array, present: Array) -> tuple[State, list[Array]]:
        (*groups, metric_values), disagree = super().finish_step(state, total, rows, present)
        return (*groups, optimizer_update.track_losses(self.model, metric_values, total, rows)), disagree

    def run_alone(self, state: State, batch: PyTree) -> None:
        return None

    def read_loss(self, part: Contribution, total: Contribution) -> Array:
        return part.loss

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
        terms = self._make_terms(batch, row_fraction, divisors)
        with self._state.open_scope(weights, non_trainable, metric_values, replica) as scope:
            y_pred, loss = self._compute_loss(batch, terms)
            self._state.note_assigned(scope, weights, non_trainable, batch)
            non_trainable_after = list_scope_values(scope, self.model.non_trainable_variables)
            metrics_after = list_scope_values(scope, self.model.metrics_variables)
        return ops.cast(loss, "float32"), (terms.values, y_pred, non_trainable_after, metrics_after)

    def _compute_loss(self, batch: PyTree, terms: losses.LossTerms) -> tuple[Outputs, Array]:
        """Return (predictions, loss) of the replica's rows. Needs a scope of its state."""
        training = self._mode == "train"
        x, y, sample_weight = unpack_batch(batch)
        y_pred = call_model(self.model, x, training)
        return y_pred, losses.compute_loss_contribution(self.model, x, y, y_pred, sample_weight, training, terms)

    def _scale_loss(self, loss: Array, slots: list[Array]) -> Array:
        """Return the loss as the optimizer scales it, in the optimizer state of this step."""
        optimizer = self.model.optimizer
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            return optimizer.scale_loss(loss)

    def _run_metrics(
        self,
        means: metrics.BatchLevelMeans,
        weights: list[Array],
        start: list[Array],
        y_pred: Outputs,
        batch: PyTree,
        row_fraction: Array,
    ) -> tuple[list[Array], dict[str, Array]]:
        """Return (what the rows add to the metrics' variables, the contribution to the logs of `compute_metrics` that are numbers of rows).
        One replica alone has the metrics' new state in the first place."""
        variables = self.model.metrics_variables
        x, y, sample_weight = unpack_batch(batch)

        def compute_metrics(values: list[Array]) -> tuple[list[Array], Logs]:
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
                logs = self.model.compute_metrics(x, y, y_pred, sample_weight)
                return list_scope_values(scope, variables), logs

        with means.watch():
            after, logs = compute_metrics(start)
        numbers = self._logs.weigh_numbers(logs, weights, after, row_fraction, compute_metrics)
        if self.has_one_replica:
            return after, numbers
        return means.compute_changes(variables, self._batch_means, self._state.reset_metrics(), after, row_fraction), numbers


def concatenate_raveled(arrays: list[Array]) -> Array:
    """Return one vector of all numbers."""
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *(jnp.ravel(array).astype(jnp.float32) for array in arrays)])
