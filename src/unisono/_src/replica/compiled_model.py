"""The functions of one replica of a compiled, built model, as far as a step of Keras' and a step of the user's have them in common.

State comes in and a contribution goes out; nothing is assigned. The rest of a step is in `keras_step` and `user_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras

from unisono._src.keras_private.compiled_losses import list_loss_terms, list_metrics_without_trackers
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.models import overrides_method
from unisono._src.keras_private.optimizers import list_loss_scales
from unisono._src.keras_private.trainer_state import STATE_NAMES, WITHOUT_OPTIMIZER, group_variables
from unisono._src.replica import losses, metrics, optimizer_update, overwritten
from unisono._src.replica.contribution import Contribution
from unisono._src.replica.growth import Growth
from unisono._src.replica.label_ranges import LabelRanges
from unisono._src.replica.model_state import ModelState
from unisono._src.replica.probe import ModelProbe, ProbedFunctions
from unisono._src.replica.protocol import RecordedVariables, State
from unisono._src.replica.row_coupling import OutputRows
from unisono._src.replica.same_draws import find_draw_for_rows, warn_of_fixed_seed
from unisono._src.replica.step_logs import StepLogs
from unisono._src.typing import Array, Logs, PyTree, Shape


class ModelComputation(ProbedFunctions):
    """The functions that the replicas of a model run in "train" or "evaluate"; those that are not here depend on the kind of step."""

    def __init__(self, model: keras.Model, mode: str, replicas: int, eager: bool = False) -> None:
        """`eager`: the functions are called with arrays, one operation after another, and a probe does not compile them either."""
        self.model = model
        self._mode = mode
        self.has_one_replica = replicas == 1
        self._replicas = replicas
        self._state = ModelState(model, mode == "train", self.has_one_replica)
        self._batch_means: dict[int, bool] = {}
        """For the ids of metrics' variables, whether they are means of batches. `probe` finds them."""
        self.eager = eager
        self._by_rows = OutputRows(eager, self.has_one_replica)
        self.growth = Growth()
        self.labels = LabelRanges()
        returns_logs = self.has_user_step or overrides_method(model, "compute_metrics")
        self._logs = StepLogs(model, self.growth, returns_logs, self.has_one_replica, eager)
        self._probe: ModelProbe | None = None
        self._has_checked_draws = False
        self._has_checked_rows = False
        self._checked_outputs: set[int] = set()
        """The numbers of rows for which the axes of the outputs were looked at."""

    @hide_masks()
    def finish_step(self, state: State, total: Contribution, rows: Array, present: Array) -> tuple[State, list[Array]]:
        weights, non_trainable, *slots, metric_values = state
        if total.gradients:
            gradients = overwritten.take_largest_gradients(
                self.model.trainable_variables, weights, total.gradients, self._replicas
            )
            weights, slots[0] = optimizer_update.apply_gradients(self.model.optimizer, slots[0], gradients, weights)
        non_trainable, disagree = self._state.merge_assigned(non_trainable, total.assigned, rows, present)
        metric_values = optimizer_update.add_to_metrics(metric_values, total.metrics, self.has_one_replica)
        return (weights, non_trainable, *slots, metric_values), disagree

    @hide_masks()
    def results(self, state: State) -> Logs:
        return self._logs.compute(state[0], state[-1])

    @property
    def has_own_logs(self) -> bool:
        return not self._logs.have_result_names

    def read(self) -> list[bool]:
        """Return, for each group of the state, whether replicas read it. A user step may read all of the state."""
        groups = STATE_NAMES if self._mode == "train" else WITHOUT_OPTIMIZER
        return [self.has_user_step or name in ("trainable_variables", "non_trainable_variables") for name in groups]

    def list_recorded(self) -> RecordedVariables:
        groups = group_variables(self.model)
        kinds = {"weight": "trainable_variables", "state": "non_trainable_variables", "optimizer": "optimizer_variables"}
        of_state = [(kind, groups[name]) for kind, name in kinds.items()]
        has_gradients = self._mode == "train" and not (self.has_user_step and self.has_one_replica)
        return [("gradient", groups["trainable_variables"]), *of_state] if has_gradients else of_state

    def scales(self) -> list[tuple[int, int]]:
        if self._mode != "train":
            return []
        scales = {id(variable) for variable in list_loss_scales(self.model.optimizer)}
        return [(2, index) for index, variable in enumerate(self.model.optimizer.variables) if id(variable) in scales]

    def probe(self, state: State, batch: PyTree, shards: Sequence[range], constants: Sequence[Array]) -> bool:
        """Find out how the user's numbers and metrics are merged."""
        user_metrics = metrics.find_unproven_metrics(self._fed_metrics)
        if self.has_one_replica or not (user_metrics or self.growth.number_names or self._state.has_own):
            return False
        if self._probe is None:
            self._probe = ModelProbe(self, user_metrics)
        before = self.growth.decision_count, self._batch_means
        assigned = self._state.assigned, self._state.replaced  # by a step in training, not by the steps of the probe
        try:
            self._probe.at(state, batch, shards, self._state.reset_metrics())
        finally:
            self._state.assigned, self._state.replaced = assigned
        self._batch_means = self._probe.batch_means
        return (self.growth.decision_count, self._batch_means) != before

    def list_own_changes(self, contribution: Contribution, batch: PyTree) -> list[tuple[keras.Variable, Array]]:
        return self._state.list_own_changes(contribution.assigned, batch)

    def check_draws(self, draws_of: Callable[[int], Sequence[Shape]], rows: int) -> None:
        if self._has_checked_draws:
            return
        self._has_checked_draws = True
        shape = find_draw_for_rows(draws_of, rows)
        if shape is not None:
            warn_of_fixed_seed(self.model.name, shape, self._replicas)

    @property
    def needs_probe(self) -> bool:
        return self._probe is not None

    @property
    def is_undecided(self) -> bool:
        return self._probe is not None and self._probe.is_undecided

    def check(self, disagree: list[Array]) -> None:
        self._state.check_counters(disagree)

    @property
    def _fed_metrics(self) -> list[keras.metrics.Metric]:
        """Return the metrics that the step feeds."""
        return list_metrics_without_trackers(self.model)

    def _make_means(self) -> metrics.BatchLevelMeans:
        return metrics.BatchLevelMeans(self._fed_metrics, self._by_rows)

    def _make_terms(self, batch: PyTree, row_fraction: Array, divisors: Array | None, as_mean: bool = False) -> losses.LossTerms:
        loss_functions = [term.loss for term in list_loss_terms(self.model)]
        as_mean = as_mean or overrides_method(self.model, "compute_loss")
        note_labels = functools.partial(self.labels.note, batch)
        return losses.LossTerms(loss_functions, row_fraction, self.growth, self._by_rows, divisors, as_mean, note_labels)
