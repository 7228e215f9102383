"""How Keras' loop goes through the steps of an epoch. It takes several steps at a time, or begins at a later step."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

from keras.src.trainers.epoch_iterator import EpochIterator

from unisono._src.typing import KerasObject, UserBatch

Batches: TypeAlias = "Iterator[UserBatch] | NoStep"
"""The batches of a step."""
Group: TypeAlias = Callable[[Iterator[UserBatch], int, bool, bool], Iterator[UserBatch]]
"""`group(batches, count, is_first, is_last)` makes the batches of `count` steps. The flags say whether they begin or end an epoch."""


class EpochSteps:
    """Control over how Keras' loop goes through an epoch's steps."""

    def __init__(self, iterator: EpochIterator) -> None:
        self._iterator: KerasObject = iterator
        self._stock = iterator._enumerate_iterator
        self._grouping: tuple[Callable[[int], int], Group] | None = None
        self._begin: tuple[int, Iterator[UserBatch], int, Callable[[], None] | None] | None = None
        self._loops_before = 0
        self._resumed: Iterator[UserBatch] | None = None
        """The batches of a resumed pass: the loop began in its middle."""
        object.__setattr__(iterator, "_enumerate_iterator", self._steps)

    def group_steps(self, size: Callable[[int], int], group: Group) -> None:
        """Take several steps at a time, as with `steps_per_execution`.

        These are `size(step)` steps, but none beyond the end of the epoch. The steps get the iterator that `group` makes.
        """
        self._grouping = size, group

    def begin_at_step(
        self, step: int, batches: Iterator[UserBatch], read: int, before_step: Callable[[], None] | None = None
    ) -> None:
        """Begin the next epoch at this step, with these batches.

        `read` batches of their pass were read before. `before_step` is called after `on_epoch_begin` of callbacks, and before their
        `on_train_batch_begin`. If no batch is left, the previous step comes again, with `NoStep` in place of batches: Keras ends an epoch
        with the logs of its last step.
        """
        self._begin = step, batches, read, before_step

    def read_loops(self, loops: int) -> None:
        """Read what `loops` earlier loops read, when the next loop begins. The source is then where they left it."""
        self._loops_before = loops

    def close(self) -> None:
        """Close the readers that read ahead of the last step.

        Otherwise the workers of a dataset would wait for them when the program ends.
        """
        for batches in (self._iterator._current_iterator, self._resumed):
            close = getattr(batches, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):  # of a batch that no step has asked for
                    close()

    @property
    def adapter(self) -> KerasObject:
        return self._iterator.data_adapter

    @property
    def steps(self) -> int | None:
        """The number of steps in an epoch; None if it is unknown."""
        return self._iterator.num_batches

    @property
    def are_passes(self) -> bool:
        """Whether each epoch is a pass over the data."""
        return self._iterator.steps_per_epoch in (None, self._iterator.data_adapter.num_batches)

    def is_pass_over(self, read: int) -> bool:
        """Whether the next epoch begins another pass.

        To be asked at the end of an epoch. `read` batches of this pass were read.
        """
        iterator = self._iterator
        length = self._iterator._num_batches
        return iterator.steps_per_epoch is None or iterator._current_iterator is None or bool(length and read >= length)

    def _read_loop(self) -> None:
        """Read the batches of one `evaluate` loop, and reset the iterator. The next `evaluate` resets it so."""
        iterator = self._iterator
        with iterator.catch_stop_iteration():
            for begin, end, batches in self._stock():
                next(batches)
                collections.deque(itertools.islice(batches, end - begin), maxlen=0)
        current = iterator._epoch_iterator
        iterator.reset()
        iterator._epoch_iterator = current

    def _steps(self) -> Iterator[tuple[int, int, Batches]]:
        loops, self._loops_before = self._loops_before, 0
        for _ in range(loops):
            self._read_loop()
        singles: Iterator[tuple[int, int, KerasObject]] = self._singles()
        is_first = True
        for begin, end, batches in singles:
            if self._grouping is not None and not isinstance(batches, NoStep):
                size, group = self._grouping
                steps = size(begin)
                if self._iterator.data_adapter.num_batches is None:  # the pass may end within the group
                    batches = ReadBatches(batches, min(steps, self._iterator.steps_per_epoch - begin))
                    steps = len(batches)
                while end - begin + 1 < steps and self._more_in_epoch(end + 1):
                    _, end, _ = next(singles)
                batches = group(batches, end - begin + 1, is_first, not self._more_in_epoch(end + 1))
                is_first = False
            yield begin, end, batches

    def _singles(self) -> Iterator[tuple[int, int, Batches]]:
        if self._begin is None:
            yield from self._stock()
            return
        (first_step, batches, read, before_step), self._begin = self._begin, None
        if before_step is not None:
            before_step()
        iterator = self._iterator
        first = next(batches, None)
        if first is None:
            iterator.data_adapter.on_epoch_begin()
            yield first_step - 1, first_step - 1, NoStep()
            iterator.data_adapter.on_epoch_end()
            return
        self._resumed = batches
        batches = itertools.chain([first], batches)
        if iterator.steps_per_epoch is None:  # Keras asks for the batches of the pass

            def get_batches_once() -> Iterator[UserBatch]:
                object.__setattr__(iterator, "_get_iterator", get_iterator)
                return batches

            get_iterator = iterator._get_iterator
            object.__setattr__(iterator, "_get_iterator", get_batches_once)
        iterator._current_iterator = batches
        iterator._steps_seen = read - first_step  # Keras counts the skipped steps, too: it has seen `read` batches behind them
        yield from ((begin, end, remaining) for begin, end, remaining in self._stock() if begin >= first_step)

    def _more_in_epoch(self, step: int) -> bool:
        # One request too many, and Keras' generator would end the epoch before its last batches were read.
        iterator = self._iterator
        length = self._iterator._num_batches
        return step < (iterator.steps_per_epoch or length or 0) and not (length and iterator._steps_seen >= length)


def is_controlled(iterator: EpochIterator) -> bool:
    """Whether an `EpochSteps` controls the epochs of this iterator."""
    return "_enumerate_iterator" in vars(iterator)


class ReadBatches:
    """Batches that are read ahead, so that their number is known. An error of the source is raised after the last of them."""

    def __init__(self, batches: Iterator[UserBatch], most: int) -> None:
        self._batches: list[UserBatch] = []
        self._error: Exception | None = None
        try:
            for batch in itertools.islice(batches, most):
                self._batches.append(batch)
        except Exception as error:  # of the source; it is raised in place of the next batch
            self._error = error
        self._length = len(self._batches) + (self._error is not None)

    def __len__(self) -> int:
        """The number of batches; an error counts as one."""
        return self._length

    def __iter__(self) -> Iterator[UserBatch]:
        return self

    def __next__(self) -> UserBatch:
        if self._batches:
            return self._batches.pop(0)
        raise StopIteration if self._error is None else self._error


class NoStep:
    """Stands for batches when an epoch has no step left."""
