"""The functions of one replica of a compiled, built model: training, evaluation, prediction, and the divisors of its losses.

State comes in and a contribution goes out; nothing is assigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import ops

from unisono._src import keras_private
from unisono._src.replica import losses, metrics, optimizer_update, overwritten, state_merging, user_step
from unisono._src.replica.contribution import Assigned, Contribution
from unisono._src.replica.growth import APPLIED, Growth
from unisono._src.replica.output_rows import ByRows
from unisono._src.replica.probe import Look
from unisono._src.replica.protocol import State
from unisono._src.replica.replica_dependence import are_same_for_all, in_shapes


class ReplicaFunctions:
    """What the replicas of a model run in "train", "evaluate" or "predict"."""

    def __init__(self, model: Any, mode: str, replicas: int, eager: bool = False) -> None:
        """`eager`: whether they are called with arrays, one operation after another, and so are not compiled to look at them either."""
        self.model = model
        self.mode = mode
        self.alone = replicas == 1
        self._replicas = replicas
        self.assigned: list[int] = []
        """Positions, among the non-trainable variables, of those that the forward pass assigns; found by a trace, and the same
        for every number of rows."""
        self.weighted_by_share: dict[int, bool] = {}
        """For the ids of metrics' variables, whether they are means of batches; found by `look`."""
        self.eager = eager
        self._by_rows = ByRows(eager, self.alone)
        self.growth = Growth()
        """Of losses that are one number for all rows; found by `look`."""
        self._look: Look | None = None

    @keras_private.fresh_masks()
    def contribution(
        self, state: State, batch: Any, replica: Any, share: Any, divisors: Any, constants: Any = ()
    ) -> tuple[Contribution, Any]:
        by = self._own_contribution if self.is_own else self._contribution
        return by(state, batch, replica, share, divisors), ()

    @property
    def is_own(self) -> bool:
        """Whether the step is one of the model's own."""
        return user_step.is_own(self.model, self.mode)

    def _contribution(self, state: State, batch: Any, replica: Any, share: Any, divisors: Any) -> Contribution:
        """By the step that Keras has."""
        weights, others, *slots, tracked = state
        means = metrics.BatchLevelMeans(keras_private.leaf_metrics(self.model), self._by_rows)
        gradients, training = [], self.mode == "train"

        def loss_of(weights: Any) -> Any:
            with means.watch():
                loss, aux = self._forward(weights, others, tracked, batch, replica, share, divisors)
            return self._scaled(loss, slots[0]) if training else loss, (loss, *aux)

        if training:
            gradients, (loss, terms, y_pred, others_after, started) = jax.grad(loss_of, has_aux=True)(weights)
            gradients = [g.astype(jnp.float32) if jnp.issubdtype(g.dtype, jnp.floating) else g for g in gradients]
            gradients = overwritten.spread(self.model.trainable_variables, gradients, replica, self._replicas)
        else:
            _, (loss, terms, y_pred, others_after, started) = loss_of(weights)
        added, logs = self._metrics(means, started, y_pred, batch, share)
        return Contribution(gradients, self._handed_on(others, others_after, batch, replica), added, loss, terms, logs)

    @keras_private.fresh_masks()
    def gradients_of_numbers(self, state: State, batch: Any, share: Any, divisors: Any) -> dict[str, Any]:
        """Return the gradient of each loss that is one number for all rows, as one vector; of none that a step of the model's own makes."""
        weights, others, *_, tracked = state
        if self.is_own or self.mode != "train":
            return {}

        def numbers_of(weights: Any) -> dict[str, Any]:
            with self.growth.caught() as numbers:
                self._forward(weights, others, tracked, batch, jnp.int32(0), share, divisors)
            return numbers

        numbers, backward = jax.vjp(numbers_of, weights)
        ones = {what: {name: jnp.float32(name == what) for name in numbers} for what in numbers}
        return {what: flat(backward(one)[0]) for what, one in ones.items()}

    @keras_private.fresh_masks()
    def alone_by_itself(self, state: State, batch: Any) -> tuple[State, dict[str, Any]] | None:
        """A step of the model's own needs nobody else."""
        if not (self.alone and self.is_own):
            return None
        logs, new = user_step.call_step(self.model, self.mode, state, batch)
        return new, self._beside_metrics(logs, new[-1], jnp.float32(1))

    def _own_contribution(self, state: State, batch: Any, replica: Any, share: Any, divisors: Any) -> Contribution:
        by_itself = self.alone_by_itself(state, batch)
        if by_itself is not None:
            return Contribution([], Assigned([], [], []), [], jnp.float32(0), jnp.zeros(0), by_itself[1])
        model, terms = self.model, self._terms(share, divisors, as_mean=True)
        means = metrics.BatchLevelMeans(self._fed_by_the_step, self._by_rows)
        with keras_private.other_losses(model, terms.stand_ins), means.watch():
            weights, others, *slots, _ = state
            start, reset = self._for_replica(others, replica), self._reset()
            left = user_step.run(model, self.mode, (weights, start, *slots, reset), batch)
        self._note_changed(start, left.others)
        variables = model.trainable_variables if left.gradients else []
        gradients = self._weighted_gradients(variables, left.gradients, share)
        return Contribution(
            overwritten.spread(variables, gradients, replica, self._replicas),
            self._handed_on(others, left.others, batch, replica),
            self._added(means, reset, left.metrics, share),
            jnp.float32(0),
            jnp.zeros(len(keras_private.loss_terms(model))),
            self._beside_metrics(left.logs, left.metrics, share),
        )

    @property
    def _fed_by_the_step(self) -> list[Any]:
        """The metrics that the step feeds; a step of the model's own feeds the loss' trackers too."""
        trackers = [keras_private.loss_tracker(self.model), *keras_private.term_trackers(self.model)] if self.is_own else []
        shown = {id(v) for v in self.model.metrics_variables}
        return [*keras_private.leaf_metrics(self.model), *(t for t in trackers if shown.issuperset(map(id, t.variables)))]

    def _weighted_gradients(self, variables: list[Any], gradients: list[Any], share: Any) -> list[Any]:
        """The replica's part of those that a step of the model's own applies, of what it made of a replica's rows."""
        floats = [
            position
            for position, (v, g) in enumerate(zip(variables, gradients, strict=True))
            if jnp.issubdtype(g.dtype, jnp.floating) and not overwritten.overwrites(v)
        ]
        if not floats:
            return gradients
        own = self.growth.weighted_all(APPLIED, [gradients[i].astype(jnp.float32) for i in floats], share)
        return [dict(zip(floats, own, strict=True)).get(position, g) for position, g in enumerate(gradients)]

    @keras_private.fresh_masks()
    def predict(self, weights: Any, others: Any, batch: Any, replica: Any) -> tuple[Any, Assigned]:
        """(outputs, what the forward pass assigned)."""
        if self.is_own:
            start = self._for_replica(others, replica)
            outputs, after = user_step.predicted(self.model, (weights, start), batch)
            self._note_changed(start, after)
            return outputs, self._handed_on(others, after, batch, replica)
        x = keras_private.unpack(batch)[0]
        with self._scope(weights, others, None, replica) as scope:
            outputs = keras_private.call_model(self.model, x, training=False)
            after = [scope.get_current_value(v) for v in self.model.non_trainable_variables]
        self._note_assigned(scope, (weights, others), batch)
        return outputs, self._handed_on(others, after, batch, replica)

    @keras_private.fresh_masks()
    def divisors(self, state: State, batch: Any, replica: Any, share: Any, constants: Any = ()) -> list[Any]:
        weights, others, *slots, tracked = state
        terms, training = self._terms(share, None), self.mode == "train"
        if self.is_own:
            if self.alone:  # it divides by itself
                return []
            with keras_private.other_losses(self.model, terms.stand_ins):
                start = weights, self._for_replica(others, replica), *slots, tracked
                left = user_step.run(self.model, self.mode, start, batch)
            self._weighted_gradients(self.model.trainable_variables if left.gradients else [], left.gradients, share)
            self._beside_metrics(left.logs, left.metrics, share)
            return terms.divisors
        with self._scope(weights, others, None, replica):
            x, y, sample_weight = keras_private.unpack(batch)
            y_pred = keras_private.call_model(self.model, x, training)
            losses.share_of_loss(self.model, x, y, y_pred, sample_weight, training, terms, share, self.growth)
        if keras_private.overrides(self.model, "compute_metrics"):  # whose logs may be numbers of its own
            means = metrics.BatchLevelMeans(keras_private.leaf_metrics(self.model), self._by_rows)
            self._metrics(means, tracked if self.alone else self._reset(), y_pred, batch, share)
        return terms.divisors

    @keras_private.fresh_masks()
    def finished(self, state: State, total: Contribution, rows: Any, present: Any) -> tuple[State, list[Any]]:
        weights, others, *slots, tracked = state
        if total.gradients:
            gradients = overwritten.largest(self.model.trainable_variables, weights, total.gradients, self._replicas)
            weights, slots[0] = optimizer_update.applied(self.model.optimizer, slots[0], gradients, weights)
        variables = self.model.non_trainable_variables
        others, disagree = state_merging.merged(variables, self.assigned, self.alone, others, total.assigned, rows, present)
        values = optimizer_update.added(tracked, total.metrics, self.alone)
        tracked = values if self.is_own else optimizer_update.tracked(self.model, values, total, rows)
        return (weights, others, *slots, tracked), disagree

    @keras_private.fresh_masks()
    def results(self, state: State) -> dict[str, Any]:
        return optimizer_update.results(self.model, state[0], state[-1])

    def read(self) -> list[bool]:
        """A step of the model's own may read all of the state."""
        groups = keras_private.STATE_NAMES if self.mode == "train" else keras_private.WITHOUT_OPTIMIZER
        return [self.is_own or name in ("trainable_variables", "non_trainable_variables") for name in groups]

    def scales(self) -> list[tuple[int, int]]:
        if self.mode != "train":
            return []
        scales = {id(v) for v in scaling_variables(self.model.optimizer)}
        return [(2, index) for index, v in enumerate(self.model.optimizer.variables) if id(v) in scales]

    def look(self, state: State, batch: Any, shards: Sequence[range], constants: Any) -> bool:
        """Find out how numbers and metrics of the user's own are merged."""
        own = metrics.unpromised(self._fed_by_the_step)
        if self.alone or not (own or self.growth.asked_for):
            return False
        if self._look is None:
            self._look = Look(self, own)
        before = self.growth.decisions, self.weighted_by_share
        assigned = self.assigned  # by a step in training, not by the steps that are looked at
        try:
            self._look.at(state, batch, shards, self._reset())
        finally:
            self.assigned = assigned
        self.weighted_by_share = self._look.weighted_by_share
        return (self.growth.decisions, self.weighted_by_share) != before

    @property
    def is_looked_at(self) -> bool:
        return self._look is not None

    @property
    def is_undecided(self) -> bool:
        return self._look is not None and self._look.is_undecided

    def check(self, disagree: list[Any]) -> None:
        state_merging.check_counters(self.model.non_trainable_variables, self.assigned, disagree)

    def _terms(self, share: Any, totals: Any, as_mean: bool = False) -> losses.Terms:
        as_mean = as_mean or keras_private.overrides(self.model, "compute_loss")
        return losses.Terms(
            [term.loss for term in keras_private.loss_terms(self.model)], share, self.growth, self._by_rows, totals, as_mean
        )

    def _reset(self) -> list[Any]:
        return metrics.reset_values(self.model.metrics, self.model.metrics_variables)

    def _scope(self, weights: Any, others: Any, tracked: Any, replica: Any) -> keras_private.RecordingScope:
        """`tracked` is the metrics' state, from which one replica alone goes on; others start from the reset state."""
        model = self.model
        start = tracked if self.alone and tracked is not None else self._reset()
        mapping = [
            *zip(model.trainable_variables, weights, strict=True),
            *zip(model.non_trainable_variables, self._for_replica(others, replica), strict=True),
            *zip(model.metrics_variables, start, strict=True),
        ]
        return keras_private.RecordingScope(state_mapping=mapping, collect_losses=True)

    def _for_replica(self, others: Any, replica: Any) -> list[Any]:
        return state_merging.for_replica(self.model.non_trainable_variables, others, replica)

    def _forward(self, weights: Any, others: Any, tracked: Any, batch: Any, replica: Any, share: Any, totals: Any) -> Any:
        model, terms, training = self.model, self._terms(share, totals), self.mode == "train"
        x, y, sample_weight = keras_private.unpack(batch)
        with self._scope(weights, others, tracked, replica) as scope:
            y_pred = keras_private.call_model(model, x, training)
            loss = losses.share_of_loss(model, x, y, y_pred, sample_weight, training, terms, share, self.growth)
            self._note_assigned(scope, (weights, others), batch)
            others_after = [scope.get_current_value(v) for v in model.non_trainable_variables]
            metrics_after = [scope.get_current_value(v) for v in model.metrics_variables]
        return ops.cast(loss, "float32"), (terms.values, y_pred, others_after, metrics_after)

    def _note_assigned(self, scope: keras_private.RecordingScope, state: tuple[Any, Any], batch: Any) -> None:
        model = self.model
        position = {id(v): index for index, v in enumerate(model.non_trainable_variables)}
        known = position.keys() | {id(v) for v in model.metrics_variables}
        dropped = [v for i, v in scope.assigned.items() if i not in known]
        if dropped and not (self.alone or self._are_same_for_all(dropped, state, batch)):
            kind = "a trainable variable, by the rows" if dropped[0].trainable else "a variable that the model does not track"
            raise ValueError(
                f"The forward pass assigns {dropped[0].path!r}, {kind}: replicas cannot agree on its value. Trainable "
                f"state changes through gradients alone; other state must be an attribute of a layer of the model."
            )
        self.assigned = sorted(position[i] for i in scope.assigned if i in position)

    def _are_same_for_all(self, variables: list[Any], state: tuple[Any, Any], batch: Any) -> bool:
        """Whether what the forward pass assigns to these trainable variables depends on weights and other state alone, as power iteration
        does: neither on the rows and how many there are, nor on a replica's random numbers. Keras drops it after the step."""
        if not all(variable.trainable for variable in variables):
            return False

        @keras_private.fresh_masks()
        def assigned_values(state: tuple[Any, Any], own: tuple[Any, Any]) -> list[Any]:
            batch, replica = own
            with self._scope(*state, None, replica) as scope:
                keras_private.call_model(self.model, keras_private.unpack(batch)[0], self.mode == "train")
                return [scope.get_current_value(v) for v in variables]

        times = (1,) if keras_private.static_rows(self.model) is not None else (1, 2)
        owns = [(in_shapes(batch, n), in_shapes(jnp.int32(0))) for n in times]
        return are_same_for_all(assigned_values, in_shapes(state), owns)

    def _note_changed(self, before: list[Any], after: list[Any]) -> None:
        """By a step of the model's own."""
        self.assigned = [index for index, (new, old) in enumerate(zip(after, before, strict=True)) if new is not old]

    def _scaled(self, loss: Any, slots: Any) -> Any:
        """As the optimizer scales it, in the state that it has now."""
        optimizer = self.model.optimizer
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            return optimizer.scale_loss(loss)

    def _handed_on(self, before: Any, after: Any, batch: Any, replica: Any) -> Assigned:
        variables, rows = self.model.non_trainable_variables, jax.tree.leaves(batch)[0].shape[0]
        return state_merging.handed_on(variables, self.assigned, self.alone, before, after, rows, replica)

    def _metrics(
        self, means: metrics.BatchLevelMeans, start: Any, y_pred: Any, batch: Any, share: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """(what the rows add to the metrics' variables, what `compute_metrics` returns beside them). One replica alone has
        the metrics' new state in place of what is added."""
        model, variables = self.model, self.model.metrics_variables
        x, y, sample_weight = keras_private.unpack(batch)
        reset = self._reset()
        with keras.StatelessScope(state_mapping=list(zip(variables, start, strict=True))) as scope, means.watch():
            logs = model.compute_metrics(x, y, y_pred, sample_weight)
            after = [scope.get_current_value(v) for v in variables]
        extra = self._beside_metrics(logs, after, share)
        return (after if self.alone else self._added(means, reset, after, share)), extra

    def _added(self, means: metrics.BatchLevelMeans, reset: list[Any], after: list[Any], share: Any) -> list[Any]:
        by_share = dict.fromkeys(means.variables(), True) | self.weighted_by_share
        return metrics.added(self.model.metrics_variables, by_share, reset, after, share)

    def _beside_metrics(self, logs: Any, after: list[Any], share: Any) -> dict[str, Any]:
        """The replica's part of the logs that no metric gives."""
        with keras.StatelessScope(state_mapping=list(zip(self.model.metrics_variables, after, strict=True))):
            own = set(self.model.get_metrics_result())
        beside = {name: ops.cast(value, "float32") for name, value in metrics.flattened(logs or {}).items() if name not in own}
        return {name: self.growth.weighted(f"the log {name!r}", value, share) for name, value in beside.items()}


def scaling_variables(optimizer: Any) -> list[Any]:
    """The optimizer's variables that scale the loss: none but a loss scale."""
    return [optimizer.dynamic_scale] if isinstance(optimizer, keras_private.LossScaleOptimizer) else []


def flat(arrays: list[Any]) -> Any:
    """Return one vector of all numbers."""
    return jnp.concatenate([jnp.ravel(array).astype(jnp.float32) for array in arrays])
