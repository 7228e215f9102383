"""A source of global batches, with their positions."""

from __future__ import annotations

import abc
from collections.abc import Container, Iterator
from typing import TypeVar, cast

import numpy as np

from unisono._src.engine.global_batch import BatchArray, is_batch_array
from unisono._src.keras.data.resume import NumberedBatch, resume_indexed, resume_stream
from unisono._src.keras.data.resume_point import Digest, ResumePoint, Size
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.data.shared_reading import SharedReading
from unisono._src.keras.private.data_adapters import DataAdapter
from unisono._src.placement import Placement
from unisono._src.typed_jax import map_tree
from unisono._src.typing import PyTree, UserBatch

T = TypeVar("T")


class Source(DataAdapter, abc.ABC):
    """A source of global batches with their positions.

    It is read one pass at a time, by `fit` and by loops. Keras' loops read it as one of their adapters.
    """

    order: RowOrder
    is_stream: bool
    """Whether a batch that was read and not trained on is lost."""
    has_index: bool
    """Whether a later batch can be read without the earlier ones."""
    is_shared = False
    """Whether several processes read it together. They must then ask for each batch at the same time."""
    changes_with_epochs = False
    """Whether it may change when Keras begins or ends an epoch, which is no pass."""
    # Most sources do not know what Keras asks for here. To pyright a property that is made by a call overrides none.
    batch_size = has_partial_batch = partial_batch_size = property(lambda self: None)  # pyright: ignore[reportIncompatibleMethodOverride]

    @abc.abstractmethod
    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        """Read the batches of one pass, as (pass, number, rows).

        `wrap_arrays` has wrapped the rows. Reading tells `order.note_pass` of a pass whose batches are trained on, and goes one batch ahead
        unless this is a stream. `start` may be later than the first batch only for a source with an index.
        """

    def begin_pass(self) -> None:
        """Tell what is read that a pass begins, if reading its batches does not. By default nothing is done."""

    def skip(self, passes: range, left: Container[int] = (), begun: bool = False) -> None:
        """Skip these passes of a source with an index.

        `left` are passes whose end was not reached. `begun`: what is read was told that the first one begins. By default nothing is done: a
        list does not change between passes.
        """

    @property
    def has_state(self) -> bool:
        """Whether a pass may depend on earlier passes. The order that we decide does not count."""
        return not self.has_index

    def warn_before_resumes(self) -> None:
        """Warn of a source that may give a resumed training other rows. Nothing is known of an iterable."""

    def size(self) -> Size:
        """Count the batches and rows of the current pass."""
        return {} if self.num_batches is None else {"batches": self.num_batches}

    @property
    def seeds(self) -> list[int]:
        """The seeds of the orders of rows."""
        return [self.order.seed]

    @seeds.setter
    def seeds(self, seeds: list[int]) -> None:
        (self.order.seed,) = seeds

    def from_place(self, place: ResumePoint) -> tuple[Iterator[NumberedBatch], Digest | None]:
        """Resume a pass at a resume point.

        The result has the batches from there on, and the digest of earlier batches, if they were read.
        """

        def begin(pass_: int, start: int = 0) -> Iterator[NumberedBatch]:
            self.order.passes = pass_
            return self.batches(start)

        def begin_indexed(pass_: int, start: int) -> Iterator[NumberedBatch]:
            self.begin_pass()
            return begin(pass_, start)

        if self.has_index:
            return resume_indexed(place, begin_indexed, self.skip, self.size), None
        return resume_stream(place, begin, self.size)

    def batches_from(self, start: int) -> Iterator[UserBatch]:
        return (batch for _, _, batch in self.batches(start))

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[UserBatch]:
        """Yield single batches. Keras 3.16 asks for several at once, which our steps take from the iterator one by one."""
        return self.batches_from(0)

    def get_numpy_iterator(self) -> Iterator[UserBatch]:
        return (map_tree(get_array, batch, is_leaf=is_batch_array) for batch in self.batches_from(0))


class ReadSource(Source):
    """A source that is read here. Several processes may share the reading."""

    _shared: SharedReading | None = None

    @property
    @abc.abstractmethod
    def is_at_hand(self) -> bool:
        """Whether all rows lie in memory or in files. Then no process has to make them, and each takes its own."""

    @abc.abstractmethod
    def read(self, pass_: int, chosen: slice) -> Iterator[tuple[int, PyTree]]:
        """Read chosen batches of a pass, as (number, batch).

        `wrap_arrays` has wrapped their rows. `chosen` begins later than the first batch, or leaves some out, only for a source with an index.
        """

    def begin_reading(self) -> None:
        """Tell what is read that a pass begins, where Keras does not. By default nothing is done."""

    def end_reading(self) -> None:
        """Tell what is read that a pass has ended, where Keras does not. By default nothing is done."""

    def note_reading(self, pass_: int) -> None:
        """Note that a batch of this pass was read."""
        self.order.note_pass(pass_)

    def share(self, placement: Placement, in_turns: bool = True) -> None:
        """Share the reading with the other processes of a placement, if there are any and batches have to be made.

        `in_turns`: whether processes may make batches before those ahead of them are trained on, where there is an index.
        """
        self.is_shared = placement.processes is not None and not self.is_at_hand
        self._shared = SharedReading(placement, in_turns) if self.is_shared else None

    def batches(self, start: int = 0) -> Iterator[NumberedBatch]:
        read = self._read_pass(start)
        return read if self.is_stream else read_one_ahead(read)

    def _read_pass(self, start: int) -> Iterator[NumberedBatch]:
        pass_ = self.order.passes
        self.begin_reading()
        read = self.read(pass_, slice(start, None, 1)) if self._shared is None else self._shared.read(self, pass_, start)
        for number, batch in read:
            self.note_reading(pass_)
            yield pass_, number, batch
        self.end_reading()


def get_array(rows: BatchArray) -> np.ndarray:
    return rows.array


def read_one_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yield the same batches, reading one batch ahead. An error is raised after the last good batch."""
    end = object()
    ready = next(batches, end)
    while ready is not end:
        error = None
        try:
            ahead = next(batches, end)
        except Exception as raised:  # of the source; it is raised after the batch before it
            error = raised
            ahead = end
        yield cast(T, ready)
        if error is not None:
            raise error
        ready = ahead
