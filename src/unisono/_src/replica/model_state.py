"""The state of a compiled model on its replicas: the values from which a replica starts, and the variables that its code assigns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras

from unisono._src.keras_private.compiled_losses import call_model
from unisono._src.keras_private.data_adapters import count_static_rows, unpack_batch
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.models import list_inner_metric_ids, list_own_state
from unisono._src.keras_private.trainer_state import RecordingScope, list_scope_values
from unisono._src.replica import metrics, state_merging
from unisono._src.replica.contribution import AssignedState
from unisono._src.replica.replica_dependence import are_same_for_all
from unisono._src.replica.row_coupling import describe_shapes
from unisono._src.typing import Array, PyTree


class ModelState:
    """The state of a model, as its replicas read and assign it in one kind of step."""

    def __init__(self, model: keras.Model, is_training: bool, has_one_replica: bool) -> None:
        self._model = model
        self._is_training = is_training
        self._has_one_replica = has_one_replica
        self._own = {id(variable) for variable in list_own_state(model)}
        """The ids of the variables of the user's own layers."""
        self._known = {id(variable) for variable in model.variables}
        """The ids of the variables that the state has values of."""
        self.assigned: list[int] = []
        """Positions, among the non-trainable variables, of the variables that the replica's code assigns. A trace finds them; they are the
        same for every number of rows."""
        self.replaced: set[int] = set()
        """Those of them whose value before the code does not read."""

    def start_values(self, non_trainable: list[Array], replica: Array) -> list[Array]:
        """Return the values of the non-trainable variables from which the replica starts."""
        return state_merging.make_start_values(self._model.non_trainable_variables, non_trainable, replica)

    def reset_metrics(self) -> list[Array]:
        """Return the values of the metrics' variables after a reset."""
        return metrics.compute_reset_values(self._model.metrics, self._model.metrics_variables)

    def open_scope(
        self, weights: list[Array], non_trainable: list[Array], metric_values: list[Array] | None, replica: Array
    ) -> RecordingScope:
        """Return a scope of the replica's state. One replica alone goes on from `metric_values`; others start from reset metrics."""
        model = self._model
        self._refuse_new_variables(len(weights) + len(non_trainable))
        start = metric_values if self._has_one_replica and metric_values is not None else self.reset_metrics()
        mapping = [
            *zip(model.trainable_variables, weights, strict=True),
            *zip(model.non_trainable_variables, self.start_values(non_trainable, replica), strict=True),
            *zip(model.metrics_variables, start, strict=True),
        ]
        return RecordingScope(state_mapping=mapping, collect_losses=True)

    def _refuse_new_variables(self, count: int) -> None:
        """Refuse variables beyond the `count` that the state has: made in a step, of a layer that nothing but the loss calls."""
        model = self._model
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        new = [variable.path for variable in variables if id(variable) not in self._known]
        if new and len(variables) > count:
            raise ValueError(
                f"A step of the model {model.name!r} made the variable {new[0]!r}: it built a layer that the forward pass does not "
                f"call. Build the layer before the model is trained: call layer.build(shape), or the layer on some rows."
            )

    def note_assigned(self, scope: RecordingScope, weights: list[Array], non_trainable: list[Array], batch: PyTree) -> None:
        """Note the variables that the forward pass assigned. Refuse those whose value replicas cannot agree on."""
        model = self._model
        positions = {id(variable): index for index, variable in enumerate(model.non_trainable_variables)}
        known = positions.keys() | {id(variable) for variable in model.metrics_variables}
        dropped = [variable for i, variable in scope.assigned.items() if i not in known]
        if dropped:
            left_out = list_inner_metric_ids(model)
            dropped = [variable for variable in dropped if id(variable) not in left_out]
        if dropped and not (self._has_one_replica or self._are_same_for_all(dropped, (weights, non_trainable), batch)):
            kind = "a trainable variable, by the rows" if dropped[0].trainable else "a variable that the model does not track"
            raise ValueError(
                f"The forward pass assigns {dropped[0].path!r}, {kind}: replicas cannot agree on its value. Trainable "
                f"state changes through gradients alone; other state must be an attribute of a layer of the model."
            )
        self.assigned = sorted(positions[i] for i in scope.assigned if i in positions)
        self.replaced = {positions[i] for i in scope.replaced if i in positions}

    def _are_same_for_all(self, variables: list[keras.Variable], state: tuple[list[Array], list[Array]], batch: PyTree) -> bool:
        """Return whether the values assigned to these trainable variables are the same on all replicas, as in power iteration: they depend on
        weights and other state alone, not on the rows, their number, or a replica's random numbers. Keras drops them after the step."""
        if not all(variable.trainable for variable in variables):
            return False

        @hide_masks()
        def compute_assigned(state: tuple[list[Array], list[Array]], inputs: tuple[PyTree, Array]) -> list[Array]:
            batch, replica = inputs
            with self.open_scope(*state, None, replica) as scope:
                call_model(self._model, unpack_batch(batch)[0], self._is_training)
                return list_scope_values(scope, variables)

        factors = (1,) if count_static_rows(self._model) is not None else (1, 2)
        shapes = [(describe_shapes(batch, factor), describe_shapes(jnp.int32(0))) for factor in factors]
        return are_same_for_all(compute_assigned, describe_shapes(state), shapes)

    def note_changed(self, before: list[Array], after: list[Array]) -> None:
        """Note the variables that a user step has changed."""
        self.assigned = [index for index, (new, old) in enumerate(zip(after, before, strict=True)) if new is not old]
        self.replaced = set()  # its own scopes tell nothing of what it reads

    def collect_assigned(self, before: list[Array], after: list[Array], batch: PyTree, replica: Array) -> AssignedState:
        """Return the replica's contribution to the variables that it assigned."""
        variables = self._model.non_trainable_variables
        rows = jax.tree.leaves(batch)[0].shape[0]
        return state_merging.collect_assigned(
            variables, self.assigned, self.replaced, self._has_one_replica, before, after, rows, replica
        )

    @property
    def has_own(self) -> bool:
        """Return whether layers of the user's own have state."""
        return bool(self._own)

    def list_own_changes(self, assigned: AssignedState, batch: PyTree) -> list[tuple[keras.Variable, Array]]:
        """Return the changes of the state of the user's own layers that replicas average, or on which they must agree."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        changes = state_merging.list_shared_changes(self._model.non_trainable_variables, self.assigned, assigned, rows)
        return [(variable, change) for variable, change in changes if id(variable) in self._own]

    def merge_assigned(
        self, before: list[Array], total: AssignedState, rows: Array, present: Array
    ) -> tuple[list[Array], list[Array]]:
        """Return (the non-trainable variables' values after the step, for each counter whether replicas disagree on it)."""
        variables = self._model.non_trainable_variables
        return state_merging.merge_assigned(
            variables, self.assigned, self.replaced, self._has_one_replica, before, total, rows, present
        )

    def check_counters(self, disagree: list[Array]) -> None:
        """Raise where replicas disagree on a counter."""
        state_merging.check_counters(self._model.non_trainable_variables, self.assigned, disagree)
