"""The functions of one replica: training, evaluation, prediction, and the divisors of its losses.

State comes in and a contribution goes out; nothing is assigned. What a trace finds out about the model (which variables
it assigns, which divisors shapes alone decide) is kept in `Findings`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import ops

from unisono import keras_seam
from unisono.replica import losses, metrics, own_step, randomness
from unisono.replica.contribution import Assigned, Contribution


@dataclasses.dataclass
class Findings:
    """What the traces of a model's replicas found; the same for every number of rows."""

    assigned: list[int] = dataclasses.field(default_factory=list)
    """Positions, among the non-trainable variables, of those that the forward pass assigns."""


class ReplicaFunctions:
    """The pure functions of a compiled, built model that a replica runs."""

    def __init__(self, model: Any, alone: bool) -> None:
        self.model = model
        self.alone = alone
        """Whether there is one replica: its state is then the model's, as in plain Keras, and nothing is merged."""
        self.findings = {name: Findings() for name in ("train", "evaluate", "predict")}
        self.weighted_by_share: dict[int, bool] = {}
        """For the ids of metrics' variables, whether they are means of batches; found by `look_at_metrics`."""

    def contribution(self, mode: str, state: Any, batch: Any, replica: Any, share: Any, divisors: Any) -> Contribution:
        """What one replica hands on in "train" or "evaluate".

        Args:
            mode: Which.
            state: The groups of the model's state, as Keras' loops have them.
            batch: The replica's rows.
            replica: Its number.
            share: Its share of the rows of the global batch.
            divisors: What each loss term of the global batch is divided by.
        """
        by = self._own_contribution if own_step.is_own(self.model, mode) else self._contribution
        return by(mode, state, batch, replica, share, divisors)

    def _contribution(self, mode: str, state: Any, batch: Any, replica: Any, share: Any, divisors: Any) -> Contribution:
        """By the step that Keras has."""
        weights, others, *slots, tracked = state
        means = metrics.BatchLevelMeans(self.model)
        gradients = []

        def loss_of(weights: Any) -> Any:
            with means.watch():
                loss, aux = self._forward(mode, weights, others, tracked, batch, replica, share, divisors)
            return self._scaled(loss, slots[0]) if mode == "train" else loss, (loss, *aux)

        if mode == "train":
            gradients, (loss, terms, y_pred, others_after, started) = jax.grad(loss_of, has_aux=True)(weights)
            gradients = [g.astype(jnp.float32) if jnp.issubdtype(g.dtype, jnp.floating) else g for g in gradients]
        else:
            _, (loss, terms, y_pred, others_after, started) = loss_of(weights)
        added, logs = self._metrics(means, started, y_pred, batch, share)
        return Contribution(gradients, self._assigned(mode, others, others_after, batch, replica), added, loss, terms, logs)

    def own_step(self, mode: str, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """(new state, logs beside the metrics) of one replica alone, whose own step needs nobody else."""
        logs, new = own_step.step_of(self.model, mode)(state, batch)
        return new, self._beside_metrics(logs, new[-1], jnp.float32(1))

    def _own_contribution(self, mode: str, state: Any, batch: Any, replica: Any, share: Any, divisors: Any) -> Contribution:
        if self.alone:
            return Contribution([], Assigned([], [], []), [], jnp.float32(0), jnp.zeros(0), self.own_step(mode, state, batch)[1])
        model, terms = self.model, self._terms(share, divisors, as_mean=True)
        means = metrics.BatchLevelMeans(model, trackers=True)
        with keras_seam.other_losses(model, terms), means.watch():
            weights, others, *slots, _ = state
            start, reset = self._for_replica(others, replica), metrics.reset_values(model)
            left = own_step.run(model, mode, (weights, start, *slots, reset), batch)
        changed = [index for index, (new, old) in enumerate(zip(left.others, start, strict=True)) if new is not old]
        self.findings[mode].assigned = changed
        return Contribution(
            [share * g.astype(jnp.float32) if jnp.issubdtype(g.dtype, jnp.floating) else g for g in left.gradients],
            self._assigned(mode, others, left.others, batch, replica),
            self._added(means, reset, left.metrics, share),
            jnp.float32(0),
            jnp.zeros(len(terms)),
            self._beside_metrics(left.logs, left.metrics, share),
        )

    def predict(self, weights: Any, others: Any, batch: Any, replica: Any) -> tuple[Any, Assigned]:
        """(outputs, what the forward pass assigned)."""
        x = keras_seam.unpack(batch)[0]
        with self._scope(weights, others, None, replica) as scope:
            outputs = keras_seam.call_model(self.model, x, training=False)
            after = [scope.get_current_value(v) for v in self.model.non_trainable_variables]
        self._note_assigned(scope, "predict")
        return outputs, self._assigned("predict", others, after, batch, replica)

    def divisors(self, mode: str, state: Any, batch: Any, replica: Any, share: Any) -> list[Any]:
        """The divisor of each loss term on these rows: a Python number, a traced number, or None."""
        weights, others, *slots, tracked = state
        terms, training = self._terms(share, None), mode == "train"
        if own_step.is_own(self.model, mode):
            if self.alone:  # it divides by itself
                return [None for _ in terms]
            with keras_seam.other_losses(self.model, terms):
                start = weights, self._for_replica(others, replica), *slots, tracked
                own_step.run(self.model, mode, start, batch)
            return [term.divisor for term in terms]
        with self._scope(weights, others, None, replica):
            x, y, sample_weight = keras_seam.unpack(batch)
            y_pred = keras_seam.call_model(self.model, x, training)
            losses.share_of_loss(self.model, x, y, y_pred, sample_weight, training, terms, share)
        return [term.divisor for term in terms]

    def look_at_metrics(self, weights: Any, others: Any, batch: Any) -> None:
        """Finds out how metrics of the user's own are merged, on a few rows of the host, before anything is compiled."""
        if self.alone or not metrics.unpromised(self.model):
            return
        rows = min(jax.tree.leaves(batch)[0].shape[0], 8)
        if rows == 1:  # parts are needed; one row several times will do
            rows, batch = 4, jax.tree.map(lambda a: np.repeat(a, 4, axis=0), batch)
        one = ReplicaFunctions(self.model, alone=True)
        totals = jnp.ones(len(keras_seam.loss_terms(self.model)))

        @jax.jit
        def after(state: list[Any], some: Any) -> list[Any]:
            return one._contribution("evaluate", (weights, others, state), some, jnp.int32(0), jnp.float32(1), totals).metrics

        def updated(state: list[Any], part: range) -> list[Any]:
            return after(state, jax.tree.map(lambda a: jnp.asarray(a[part.start : part.stop]), batch))

        self.weighted_by_share = metrics.weighted_by_share(self.model, updated, rows)

    def _terms(self, share: Any, totals: Any, as_mean: bool = False) -> list[losses.Term]:
        as_mean = as_mean or keras_seam.overrides(self.model, "compute_loss")
        return [
            losses.Term(term.loss, share, None if totals is None else totals[index], as_mean)
            for index, term in enumerate(keras_seam.loss_terms(self.model))
        ]

    def _scope(self, weights: Any, others: Any, tracked: Any, replica: Any) -> keras_seam.RecordingScope:
        """`tracked` is the metrics' state, from which one replica alone goes on; others start from the reset state."""
        model = self.model
        start = tracked if self.alone and tracked is not None else metrics.reset_values(model)
        mapping = [
            *zip(model.trainable_variables, weights, strict=True),
            *zip(model.non_trainable_variables, self._for_replica(others, replica), strict=True),
            *zip(model.metrics_variables, start, strict=True),
        ]
        return keras_seam.RecordingScope(state_mapping=mapping, collect_losses=True)

    def _for_replica(self, others: Any, replica: Any) -> list[Any]:
        """The non-trainable state from which a replica starts: with random state of its own."""
        return [
            randomness.for_replica(value, replica) if randomness.is_seed(variable) else value
            for variable, value in zip(self.model.non_trainable_variables, others, strict=True)
        ]

    def _forward(
        self, mode: str, weights: Any, others: Any, tracked: Any, batch: Any, replica: Any, share: Any, totals: Any
    ) -> Any:
        model, terms, training = self.model, self._terms(share, totals), mode == "train"
        x, y, sample_weight = keras_seam.unpack(batch)
        with self._scope(weights, others, tracked, replica) as scope:
            y_pred = keras_seam.call_model(model, x, training)
            loss = losses.share_of_loss(model, x, y, y_pred, sample_weight, training, terms, share)
            self._note_assigned(scope, mode)
            others_after = [scope.get_current_value(v) for v in model.non_trainable_variables]
            metrics_after = [scope.get_current_value(v) for v in model.metrics_variables]
        values = jnp.stack([term.value for term in terms]) if terms else jnp.zeros(0)
        return ops.cast(loss, "float32"), (values, y_pred, others_after, metrics_after)

    def _note_assigned(self, scope: keras_seam.RecordingScope, mode: str) -> None:
        model = self.model
        position = {id(v): index for index, v in enumerate(model.non_trainable_variables)}
        known = position.keys() | {id(v) for v in model.metrics_variables}
        for variable in scope.assigned.values():
            if id(variable) not in known and not self.alone:  # Keras drops what one replica assigns there
                kind = "a trainable variable" if variable.trainable else "a variable that the model does not track"
                raise ValueError(
                    f"The forward pass assigns {variable.path!r}, {kind}: replicas cannot agree on its value. Trainable "
                    f"state changes through gradients alone; other state must be an attribute of a layer of the model."
                )
        self.findings[mode].assigned = sorted(position[i] for i in scope.assigned if i in position)

    def _scaled(self, loss: Any, slots: Any) -> Any:
        """As the optimizer scales it, in the state that it has now."""
        optimizer = self.model.optimizer
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            return optimizer.scale_loss(loss)

    def _assigned(self, mode: str, before: Any, after: Any, batch: Any, replica: Any) -> Assigned:
        """The parts of the state that the forward pass assigned."""
        first, rows = replica == 0, jax.tree.leaves(batch)[0].shape[0]
        moving, counters, seeds = [], [], []
        for index in self.findings[mode].assigned:
            variable, old, new = self.model.non_trainable_variables[index], before[index], after[index]
            if randomness.is_seed(variable):
                grown = new - randomness.for_replica(old, replica)
                seeds.append(jnp.where(first, grown, jnp.zeros_like(grown)))
            elif jnp.issubdtype(new.dtype, jnp.floating):
                moving.append(new if self.alone else (new.astype(jnp.float32) - old.astype(jnp.float32)) * rows)
            elif jnp.issubdtype(new.dtype, jnp.integer):
                grown = new - old
                counters.append((jnp.where(first, grown, jnp.zeros_like(grown)), grown))
            else:
                raise ValueError(
                    f"The forward pass assigns {variable.path!r} of dtype {variable.dtype}: the values of {variable.dtype} that "
                    f"replicas leave cannot be merged. Keep it as a float (averaged) or an integer (counted)."
                )
        return Assigned(moving, counters, seeds)

    def _metrics(
        self, means: metrics.BatchLevelMeans, start: Any, y_pred: Any, batch: Any, share: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """(what the rows add to the metrics' variables, what `compute_metrics` returns beside them). One replica alone has
        the metrics' new state in place of what is added."""
        model, variables = self.model, self.model.metrics_variables
        x, y, sample_weight = keras_seam.unpack(batch)
        reset = metrics.reset_values(model)
        with keras.StatelessScope(state_mapping=list(zip(variables, start, strict=True))) as scope, means.watch():
            logs = model.compute_metrics(x, y, y_pred, sample_weight)
            after = [scope.get_current_value(v) for v in variables]
        extra = self._beside_metrics(logs, after, share)
        return (after if self.alone else self._added(means, reset, after, share)), extra

    def _added(self, means: metrics.BatchLevelMeans, reset: list[Any], after: list[Any], share: Any) -> list[Any]:
        """What a replica's rows add to the metrics' variables."""
        batch_level = means.variables()
        return [
            (new - old) * share if self.weighted_by_share.get(id(variable), id(variable) in batch_level) else new - old
            for variable, new, old in zip(self.model.metrics_variables, after, reset, strict=True)
        ]

    def _beside_metrics(self, logs: Any, after: list[Any], share: Any) -> dict[str, Any]:
        """The logs that no metric gives, times the share of the rows."""
        with keras.StatelessScope(state_mapping=list(zip(self.model.metrics_variables, after, strict=True))):
            own = set(self.model.get_metrics_result())
        return {name: ops.cast(value, "float32") * share for name, value in (logs or {}).items() if name not in own}


def scaling_variables(optimizer: Any) -> list[Any]:
    """The optimizer's variables that scale the loss: none but a loss scale."""
    return [optimizer.dynamic_scale] if isinstance(optimizer, keras_seam.LossScaleOptimizer) else []
