"""The functions of one replica of a model that predicts: its outputs leave the step, and nothing but assigned state is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import keras

from unisono._src.keras_private.compiled_losses import call_model
from unisono._src.keras_private.data_adapters import unpack_batch
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.trainer_state import list_scope_values
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.model_state import ModelState
from unisono._src.replica.protocol import Divisor, RecordedVariables, State
from unisono._src.replica.user_step import is_user_step, run_predict_step
from unisono._src.typing import Array, Logs, Outputs, PyTree, Shape

INPUT_GROUPS = ("trainable_variables", "non_trainable_variables")
"""The groups of the state of a prediction; every replica reads both."""


class PredictComputation:
    """The functions that the replicas of a model run to predict. The state is that of `INPUT_GROUPS`."""

    needs_probe = False
    is_undecided = False

    def __init__(self, model: keras.Model, mode: str, replicas: int) -> None:
        """The functions are called with arrays, one operation after another."""
        self.has_one_replica = replicas == 1
        self.structure: jax.tree_util.PyTreeDef | None = None
        """The structure of the outputs in the last trace."""
        self._model = model
        self._state = ModelState(model, is_training=False, has_one_replica=self.has_one_replica)

    @hide_masks()
    def contribution(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, divisors: Array | None, constants: Sequence[Array]
    ) -> tuple[Contribution, Sequence[Array]]:
        weights, non_trainable = state
        outputs, after = self._predict(weights, non_trainable, batch, replica)
        leaves, self.structure = jax.tree.flatten(outputs)
        assigned = self._state.collect_assigned(non_trainable, after, batch, replica)
        return Contribution([], assigned, [], jnp.float32(0), jnp.zeros(0), {}), [jnp.asarray(leaf) for leaf in leaves]

    def _predict(
        self, weights: list[Array], non_trainable: list[Array], batch: PyTree, replica: Array
    ) -> tuple[Outputs, list[Array]]:
        """Return (outputs, the values of the non-trainable variables after the forward pass)."""
        if is_user_step(self._model, "predict"):
            start = self._state.start_values(non_trainable, replica)
            outputs, after = run_predict_step(self._model, (weights, start), batch)
            self._state.note_changed(start, after)
            return outputs, after
        with self._state.open_scope(weights, non_trainable, None, replica) as scope:
            outputs = call_model(self._model, unpack_batch(batch)[0], training=False)
        self._state.note_assigned(scope, weights, non_trainable, batch)
        return outputs, list_scope_values(scope, self._model.non_trainable_variables)

    def divisors(
        self, state: State, batch: PyTree, replica: Array, row_fraction: Array, constants: Sequence[Array]
    ) -> Sequence[Divisor]:
        return []

    def finish_step(self, state: State, total: Contribution, rows: Array, present: Array) -> tuple[State, list[Array]]:
        weights, non_trainable = state
        non_trainable, disagree = self._state.merge_assigned(non_trainable, total.assigned, rows, present)
        return (weights, non_trainable), disagree

    def read_loss(self, part: Contribution, total: Contribution) -> Array:
        return part.loss

    def list_recorded(self) -> RecordedVariables:
        return []

    def results(self, state: State) -> Logs:
        return {}

    @property
    def has_own_logs(self) -> bool:
        return True

    def run_alone(self, state: State, batch: PyTree) -> None:
        return None

    def read(self) -> list[bool]:
        return [True, True]

    def scales(self) -> list[tuple[int, int]]:
        return []

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        return False

    def check_draws(self, draws_of: Callable[[int], Sequence[Shape]], rows: int) -> None:
        """Do nothing: outputs are the user's to read."""

    def check(self, disagree: list[Array]) -> None:
        self._state.check_counters(disagree)
