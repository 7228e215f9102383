"""Groups of batches: several batches in one call of a step.

Whether a loop allows it is decided here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from unisono._src.keras.fit.bond import Bond
from unisono._src.keras.fit.call_arguments import read_argument
from unisono._src.keras.fit.callback_protocol import has_batch_callbacks
from unisono._src.keras.fit.steps_per_call import StepsPerCall
from unisono._src.keras.private.data_adapters import GeneratorDataAdapter, has_known_length
from unisono._src.keras.private.epoch_steps import EpochSteps
from unisono._src.keras.private.models import overrides_method
from unisono._src.typing import Arguments, KerasObject, Keywords, UserBatch


class BatchGroup:
    """The batches of one call."""

    def __init__(self, batches: Iterator[UserBatch], count: int, steps_per_call: StepsPerCall, is_last: bool) -> None:
        """Take `count` batches. `is_last`: the epoch ends with them."""
        self._batches = itertools.islice(batches, count)
        self.count = count
        self.steps_per_call = steps_per_call
        self.is_last = is_last

    def __iter__(self) -> Iterator[UserBatch]:
        return self._batches

    def __next__(self) -> UserBatch:
        return next(self._batches)


class BatchGrouping:
    """The permission to group the batches of a model's loops."""

    def __init__(self, bond: Bond) -> None:
        self._bond = bond
        self._is_allowed = False

    @contextlib.contextmanager
    def allow(self, method: str, mode: str, args: Arguments, kwargs: Keywords) -> Iterator[None]:
        """Allow groups during a call of fit or evaluate. They are not allowed where something could see the difference."""
        callbacks = read_argument(method, "callbacks", args, kwargs)
        outer = self._is_allowed
        self._is_allowed = not (overrides_method(self._bond.model, method) or has_batch_callbacks(callbacks, mode))
        try:
            yield
        finally:
            self._is_allowed = outer

    def group_steps(self, iterator: KerasObject, epochs: EpochSteps) -> None:
        """Let a loop take several steps in one call, if it may."""
        if not self._can_group(iterator):
            return
        steps_per_call = StepsPerCall()
        data_position = self._bond.data_position

        def count_steps(step: int) -> int:
            most = data_position.most_steps(step) if data_position is not None else None
            return steps_per_call.steps() if most is None else min(steps_per_call.steps(), most)

        def group(batches: Iterator[UserBatch], count: int, is_first: bool, is_last: bool) -> BatchGroup:
            if is_first:
                steps_per_call.begin_epoch()
            return BatchGroup(batches, count, steps_per_call, is_last)

        epochs.group_steps(count_steps, group)

    def _can_group(self, iterator: KerasObject) -> bool:
        """Whether one call may take several batches. A generator may not: it may look at the model after each batch."""
        stream = isinstance(iterator.data_adapter.source, GeneratorDataAdapter)
        one_by_one = stream or self._bond.model.steps_per_execution != 1 or self._bond.is_eager
        return self._is_allowed and not one_by_one and has_known_length(iterator)
