"""The functions that Keras' loops call for each execution: train, test and predict functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

from unisono._src.checks import refusals
from unisono._src.checks.jax_errors import explain_step_errors
from unisono._src.data.global_batch import GlobalBatch, as_global_batch
from unisono._src.distributed.replica_strategy import ReplicaStrategy
from unisono._src.fit.steps_per_call import BatchGroup
from unisono._src.keras_private.data_adapters import NoStep
from unisono._src.keras_private.models import find_eager_option
from unisono._src.keras_private.optimizers import read_optimizer_settings
from unisono._src.keras_private.trainer_state import hold_state, list_model_variables, list_variable_ids
from unisono._src.replica.compiled_model import ModelComputation
from unisono._src.replica.predictions import PredictComputation
from unisono._src.replica.protocol import State
from unisono._src.step.eager import EagerStep
from unisono._src.step.predict import PredictStep
from unisono._src.step.step import Step
from unisono._src.typing import KerasObject, Logs, PyTree, UserBatch


class ModelTraining(Protocol):
    """The model and its strategy, and what the training of the model is to hear of its steps."""

    model: KerasObject
    strategy: ReplicaStrategy
    ran_eagerly: bool

    @property
    def is_eager(self) -> bool: ...

    def note_trained(self, batches: list[GlobalBatch], logs: Logs) -> None: ...

    def repeat_logs(self) -> Logs: ...


class StepFunction:
    """A function of one loop of Keras. A call takes one step, as many as `steps_per_execution` says, or those of a group of batches."""

    def __init__(self, training: ModelTraining, mode: str, state_names: tuple[str, ...]) -> None:
        """`mode` is "train", "evaluate" or "predict"; `state_names` are the groups of the state that the loop hands over."""
        self._training = training
        self._model = training.model
        self._strategy = training.strategy
        self._mode = mode
        self._state_names = state_names
        self._sizes: tuple[int, ...] | None = None
        self.eager = training.is_eager
        self.variables = list_variable_ids(training.model)
        """The ids of the model's variables for which the function was made."""
        self._settings = read_optimizer_settings(training.model)
        """The settings that a trace takes as fixed."""
        self._step = self._make_step()

    def __call__(self, state: State, iterator: Iterator[UserBatch]) -> tuple[PyTree, State]:
        """Return (logs or outputs, new state)."""
        if isinstance(iterator, NoStep):
            return self._training.repeat_logs(), state
        is_training = self._mode == "train"
        sizes = tuple(map(len, state))
        if self._sizes not in (None, sizes):
            refusals.check_changed_model(self._model, is_training)
            self._step = self._make_step()
        group = iterator if isinstance(iterator, BatchGroup) else None
        batches, error = take_batches(iterator, group.count if group else self._model.steps_per_execution)
        self._sizes = sizes
        if is_training:
            refusals.check_optimizer_attributes(self._model.optimizer)
            self._follow_settings()
        replicas = self._strategy.num_replicas_in_sync
        try:
            with self._strategy.acting(), explain_step_errors(self._model, batches[0], replicas, self.eager):
                logs, state = self._step(state, batches)
        finally:
            self._training.ran_eagerly |= self.eager and is_training
            if self._step.state:
                hold_state(self._model, self._state_names, self._step.state)
        if is_training:
            self._training.note_trained(batches, logs)
        if error is not None:
            raise error
        return group.steps_per_call.note_call(len(batches), logs, self._step.has_more_logs) if group else logs, state

    def _follow_settings(self) -> None:
        """Make the step anew if an optimizer is set to something else than at its trace, as callbacks may do between two steps."""
        settings = read_optimizer_settings(self._model)
        if settings != self._settings:
            self._settings = settings
            self._step = self._make_step()

    def forget(self) -> None:
        """Release the state on the devices."""
        self._step.forget()

    def _make_step(self) -> Step | EagerStep | PredictStep:
        refusals.check_before_first_step(self._model, self._strategy)
        if self.eager:
            option = find_eager_option(self._model)
            how = f"is compiled with {option}" if option else "runs under jax.disable_jit"
            self._strategy.warn_of_slow_steps(f"The model {self._model.name!r} {how}")
        replicas = self._strategy.num_replicas_in_sync
        where = self._strategy.on_lead if self.eager else (self._strategy.placement, self._strategy.exchange)
        if self._mode == "predict":
            self._strategy.agree(list_model_variables(self._model))
            return PredictStep(PredictComputation(self._model, replicas, self.eager), *where)
        functions = ModelComputation(self._model, self._mode, replicas, self.eager)
        return EagerStep(functions, *where) if self.eager else Step(self._mode, functions, *where)


def take_batches(iterator: Iterator[UserBatch], count: int) -> tuple[list[GlobalBatch], Exception | None]:
    """Return (up to `count` batches, the error after the last of them): the batches before an error are trained on."""
    batches = [as_global_batch(next(iterator))]
    try:
        for batch in itertools.islice(iterator, count - 1):
            batches.append(as_global_batch(batch))
    except Exception as error:  # of the source; it is raised after the step
        return batches, error
    return batches, None
