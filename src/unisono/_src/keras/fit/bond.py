"""The tie between a model and its strategy.

It is the strategy in whose scope the model was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.keras.data.row_order import RowOrder, draw_seed
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.fit.call_arguments import FitCallback
from unisono._src.keras.fit.data_position import DataPosition
from unisono._src.keras.fit.watches import LossWatch
from unisono._src.keras.ownership import ModelBond, find_bond, set_bond
from unisono._src.keras.private.callbacks import forget_first_epoch
from unisono._src.keras.private.epoch_steps import EpochSteps
from unisono._src.keras.private.models import find_eager_option
from unisono._src.programs.private import jaxprs
from unisono._src.typing import KerasObject, Logs


def get_bond(model: object) -> Bond | None:
    """The bond of a model. None for a model from outside of every scope."""
    bond = find_bond(model)
    return bond if isinstance(bond, Bond) else None


class Bond(ModelBond):
    """The tie between a model and its strategy.

    It holds what the model's training needs between two calls, and the current call of fit.
    """

    def __init__(self, model: keras.Model, strategy: ReplicaStrategy) -> None:
        self.model: KerasObject = model
        self.strategy = strategy
        self.data_position: DataPosition | None = None
        """The data position of the current call of fit."""
        self.callbacks: list[keras.callbacks.Callback] = []
        """The callbacks of the current call of fit."""
        self._awaits_position = False
        """Whether there is a current call of fit, and it has no data position yet."""
        self.validations = 0
        """The number of validations in the training of the current call of fit, with those before it was resumed."""
        self._validations_to_read = 0
        self._is_validating = False
        self._losses = LossWatch()
        self._loops: list[EpochSteps] = []
        """The loops of Keras that may have batches left to read."""
        self.ran_eagerly = False
        """Whether steps that were not compiled have changed the model."""
        self._order: RowOrder | None = None
        set_bond(model, self)

    @property
    def is_eager(self) -> bool:
        """Whether steps are not to be compiled."""
        return find_eager_option(self.model) is not None or jaxprs.is_jit_disabled()

    @property
    def has_promised_bits(self) -> bool:
        """Whether every run of the program gives the same bits."""
        return self.strategy.deterministic and not self.ran_eagerly and not self.is_eager

    @property
    def order(self) -> RowOrder:
        """The order in which the model reads its data. The seed is drawn when it is first needed."""
        if self._order is None:
            self._order = RowOrder(draw_seed())
        return self._order

    @contextlib.contextmanager
    def note_fit(self, callbacks: list[keras.callbacks.Callback]) -> Iterator[None]:
        """Make the block the current call of fit. Our callbacks are called when it is over, however it ends."""
        self.callbacks = callbacks
        self._awaits_position = True
        self._losses = LossWatch()
        self.validations = self._validations_to_read = 0
        try:
            for callback in callbacks:
                if isinstance(callback, FitCallback):
                    callback.fit_begins()
            with self.close_loops():
                yield
        finally:
            callbacks = self.callbacks
            self.callbacks = []
            self.data_position = None
            self._awaits_position = False
            forget_first_epoch(self.model)
            for callback in callbacks:
                if isinstance(callback, FitCallback):
                    callback.fit_is_over()  # which may raise a signal again
            self._losses.look()

    def note_epochs(self, epochs: EpochSteps) -> None:
        """Note the epochs of a loop that begins. The first loop of a call of fit is its training."""
        self._loops.append(epochs)
        if self._awaits_position:
            self.data_position = DataPosition(epochs, self.callbacks)
            self._awaits_position = False
        elif self._is_validating and epochs.adapter.has_state:
            epochs.read_loops(self._validations_to_read)

    @contextlib.contextmanager
    def close_loops(self) -> Iterator[None]:
        """Close the loops that begin in the block at its end. A validation of fit goes on where the one before has stopped."""
        before = len(self._loops)
        try:
            yield
        finally:
            for epochs in self._loops[before:]:
                epochs.close()
            del self._loops[before:]

    @contextlib.contextmanager
    def note_validation(self) -> Iterator[None]:
        """Count the block as a validation of the current call of fit."""
        self._is_validating = True
        try:
            yield
            self.validations += 1
        finally:
            self._is_validating = False

    def resume_validations(self, count: int) -> None:
        """Continue after this many validations. Data with a state are read forward."""
        self.validations = self._validations_to_read = count

    def note_trained(self, batches: list[GlobalBatch], logs: Logs) -> None:
        """Note the batches and logs of a training step."""
        position = batches[-1].position
        if self.data_position is None:
            if position is not None:
                self.order.note_pass(position[0])
            return
        if self.strategy.writes:
            self._losses.note(len(batches), logs)
        if position is not None and self.data_position.order is not self.order and position[1] < len(batches):
            self.order.passes += 1  # this pass went over a dataset with its own order
        self.data_position.note_trained(batches, logs)

    def repeat_logs(self) -> Logs:
        """Repeat the logs of the last step. An earlier call of fit stopped at the end of this epoch."""
        return self.data_position.repeat_logs() if self.data_position is not None else {}
