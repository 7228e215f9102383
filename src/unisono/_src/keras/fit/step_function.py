"""The functions that Keras' loops call for each execution.

They are the train, test and predict functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from unisono._src.engine.global_batch import GlobalBatch, as_global_batch
from unisono._src.engine.state import State
from unisono._src.keras.checks import refusals
from unisono._src.keras.checks.jax_errors import check_optimizer_attributes, explain_step_errors
from unisono._src.keras.cut_weights import place_weights
from unisono._src.keras.data.source_warnings import SmallBatches
from unisono._src.keras.fit.bond import Bond
from unisono._src.keras.fit.steps_per_call import BatchGroup
from unisono._src.keras.fit.watches import check_labels
from unisono._src.keras.private.epoch_steps import NoStep
from unisono._src.keras.private.models import find_eager_option
from unisono._src.keras.private.optimizers import read_optimizer_settings
from unisono._src.keras.private.trainer_state import (
    STATE_NAMES,
    WITHOUT_OPTIMIZER,
    hold_state,
    list_model_variables,
    list_variable_ids,
)
from unisono._src.keras.record.run_recorder import is_recording
from unisono._src.keras.steps.loss_inputs import LabelRange, LabelRanges
from unisono._src.keras.steps.make_step import ModelSteps, make_step
from unisono._src.keras.steps.model_step import ModelStep
from unisono._src.keras.steps.predict import PredictStep
from unisono._src.typing import PyTree, UserBatch

STATE_GROUPS = {"train": STATE_NAMES, "evaluate": WITHOUT_OPTIMIZER, "predict": STATE_NAMES[:2]}
"""The groups of the state that each loop hands over."""


class StepFunction:
    """A function of one loop of Keras.

    A call takes one step, or `steps_per_execution` steps, or those of a group of batches.
    """

    def __init__(self, bond: Bond, mode: str) -> None:
        """`mode` is "train", "evaluate" or "predict"."""
        self._bond = bond
        self._model = bond.model
        self._strategy = bond.strategy
        self._mode = mode
        self._sizes: tuple[int, ...] | None = None
        self._eager = bond.is_eager
        self._variables = list_variable_ids(bond.model)
        """The ids of the model's variables for which the function was made."""
        self._settings: list[dict[str, object]] | None = None
        """The settings that the trace has taken as fixed; None before the first step."""
        self._is_recorded = is_recording()
        self._labels = LabelRanges()
        self._small_batches = SmallBatches(bond.strategy.num_replicas_in_sync)
        self._step = self._make_step()

    @property
    def has_other_variables(self) -> bool:
        """Whether the model's variables have changed since the function was made."""
        return self._variables != list_variable_ids(self._model)

    @property
    def has_other_mode(self) -> bool:
        """Whether the function was made for another mode. The mode is whether steps are compiled and, in training, recorded."""
        return self._eager != self._bond.is_eager or (self._mode == "train" and self._is_recorded != is_recording())

    def __call__(self, state: State, iterator: Iterator[UserBatch]) -> tuple[PyTree, State]:
        """Run the steps: (logs or outputs, new state)."""
        if isinstance(iterator, NoStep):
            return self._bond.repeat_logs(), state
        is_training = self._mode == "train"
        if is_training:
            check_optimizer_attributes(self._model.optimizer)
            self._follow_settings()
        sizes = tuple(map(len, state))
        if self._sizes not in (None, sizes):
            refusals.check_changed_model(self._model, is_training)
            self._step = self._make_step()
        group = iterator if isinstance(iterator, BatchGroup) else None
        replicas = self._strategy.num_replicas_in_sync
        count = group.count if group else self._model.steps_per_execution
        ranges = list(self._labels.found)
        batches, error = take_batches(iterator, count, replicas > 1, ranges)
        self._sizes = sizes
        for batch in batches if replicas > 1 and self._mode != "predict" else ():
            self._small_batches.note(batch.rows, batch.position, batch.sizes)
        try:
            with self._strategy.acting(), explain_step_errors(self._model, batches[0], replicas, self._eager):
                logs, state = self._step(state, batches)
        finally:
            self._bond.ran_eagerly |= self._eager and is_training
            if self._step.state:
                hold_state(self._model, STATE_GROUPS[self._mode], self._step.state)
        if not ranges:  # only the trace of this step has told how many classes there are
            for batch in batches:
                check_labels(self._labels.found, batch)
        if is_training:
            if self._settings is None:  # read after the trace, in which an optimizer may keep what it has found out
                self._settings = read_optimizer_settings(self._model)
            self._bond.note_trained(batches, logs)
        if error is not None:
            raise error
        if group is not None:
            logs = group.steps_per_call.note_call(len(batches), logs, self._step.has_own_logs or group.is_last)
        return logs, state

    def _follow_settings(self) -> None:
        """Rebuild the step if an optimizer's settings have changed. Callbacks may change them between two steps."""
        if self._settings is not None and self._settings != read_optimizer_settings(self._model):
            self._settings = None
            self._step = self._make_step()
            if self._sizes is not None:  # a schedule in place of a learning rate takes a variable from the optimizer
                place = STATE_NAMES.index("optimizer_variables")
                self._sizes = (*self._sizes[:place], len(self._model.optimizer.variables), *self._sizes[place + 1 :])

    def forget(self) -> None:
        """Release the state on the devices."""
        self._step.forget()

    def _make_step(self) -> ModelSteps | PredictStep:
        refusals.check_before_first_step(self._model, self._strategy)
        place_weights(self._model, self._strategy, trains=self._mode == "train")
        if self._eager:
            option = find_eager_option(self._model)
            how = f"is compiled with {option}" if option else "runs under jax.disable_jit"
            self._strategy.warn_of_slow_steps(f"The model {self._model.name!r} {how}")
        replicas = self._strategy.num_replicas_in_sync
        function = ModelStep(self._model, self._mode, replicas)
        if self._mode == "predict":
            self._strategy.agree(list_model_variables(self._model))
            step = make_step(self._strategy, "predict", function, trains=False, eager=self._eager, most_steps=1)
            return PredictStep(function, step, self._strategy.placement)
        self._labels = function.labels
        return make_step(self._strategy, self._mode, function, trains=self._mode == "train", eager=self._eager)


def take_batches(
    iterator: Iterator[UserBatch], count: int, is_cut: bool, ranges: Sequence[LabelRange]
) -> tuple[list[GlobalBatch], Exception | None]:
    """Take up to `count` batches, and the error after the last. The batches before an error are trained on.

    `is_cut`: several replicas share each batch. `ranges` are those of its labels.
    """

    def take(batch: UserBatch) -> GlobalBatch:
        taken = as_global_batch(batch, is_cut)
        check_labels(ranges, taken)
        return taken

    batches = [take(next(iterator))]
    try:
        for batch in itertools.islice(iterator, count - 1):
            batches.append(take(batch))
    except Exception as error:  # of the source, or of labels in it; it is raised after the step
        return batches, error
    return batches, None
