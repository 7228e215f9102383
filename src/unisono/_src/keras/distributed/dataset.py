"""Distributed datasets: global batches that are read and sent ahead. Each replica gets its shard of each batch."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator

import jax

from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.global_batch import Position, as_global_batch, is_batch_array
from unisono._src.engine.step.plan import plan_batch
from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras import execution_mode
from unisono._src.keras.data.resume import NumberedBatch
from unisono._src.keras.data.resume_point import ResumePoint, SourceProgress
from unisono._src.keras.data.source import ReadSource, Source
from unisono._src.keras.data.source_warnings import SmallBatches
from unisono._src.keras.distributed.batch_sources import refuse_distributed_batch
from unisono._src.keras.distributed.per_replica import Shards
from unisono._src.keras.replica.replicated import refuse_tensorflow_data
from unisono._src.placement import Placement
from unisono._src.typing import Json, PyTree, UserObject

MOST_PLANS = 64
"""The number of batch sizes whose plan is kept."""


class DistributedDataset:
    """Global batches, over which a program may loop any number of times.

    `len()` is the number of batches, if the source knows it.
    """

    def __init__(self, source: ReadSource, placement: Placement) -> None:
        source.share(placement)
        self.source: Source = source
        self.placement = placement
        self._mesh = get_mesh(placement.devices)
        self.progress = SourceProgress()
        self.listeners: list[Callable[[], None]] = []
        """Functions to call between two batches."""
        self.thread: int | None = None
        """The thread that asked for the last batch."""
        self._place: ResumePoint | None = None
        self._last_iterator: Callable[[], DistributedIterator | None] = lambda: None
        """A weak reference to the iterator of the last pass."""
        self.small_batches = SmallBatches(placement.replicas)
        self._plans = functools.lru_cache(maxsize=MOST_PLANS)(functools.partial(plan_batch, placement=placement))

    def __iter__(self) -> DistributedIterator:
        with PUBLIC_CALL:
            execution_mode.check_not_tracing()
            iterator = DistributedIterator(self)
            self._last_iterator = weakref.ref(iterator)
            return iterator

    def __len__(self) -> int:
        length = self.source.num_batches
        if length is None:
            raise TypeError("This dataset does not know how many batches it has. Count them as they come.")
        return length

    @property
    def position(self) -> Position:
        """(passes before this one, batches of this pass that were yielded)."""
        return self.progress.position or (0, 0)

    def will_be_saved(self) -> None:
        """Digest every batch of a stream from now on. To be called before the first training step."""
        self.source.warn_before_resumes()
        if not self.source.has_index:
            self.progress.digest_all()

    def get_state(self) -> dict[str, Json]:
        """Get the resume point, in JSON.

        After a `break` it is the begin of the next pass, where the next loop of this process begins too. While an error or an interruption
        is being handled, it is the point that the loop had reached.
        """
        if self._place is None and self._last_iterator() is None and sys.exception() is None:
            self._leave_pass()
        place = self._place or self.progress.place
        return {"seeds": self.source.seeds, "place": None if place is None else place._asdict()}

    def set_state(self, state: dict[str, Json]) -> None:
        """Resume the next loop from what `get_state` has returned."""
        self.source.seeds = state["seeds"]
        self._place = None if state["place"] is None else ResumePoint.from_json(state["place"])
        if self._place is None:  # before the first batch
            self.progress = SourceProgress()
            self.source.order.passes = 0

    def _leave_pass(self) -> None:
        """Leave the pass, and warn if it has not ended. The next loop is over another pass."""
        pass_, number = self.position
        count = self.source.num_batches
        if number and number != count and not self.progress.left:
            warnings.warn(
                f"The loop over the dataset was left after {number}{f' of {count}' if count else ''} batches of pass {pass_}, and then saved: what "
                f"resumes from here begins the next pass, as the next loop of this process does. To resume in the middle of a pass, save inside "
                f"of the loop, or with checkpoint.saving_on_signal.",
                stacklevel=2,
            )
        self.progress.leave_pass()

    def begin_pass(self) -> Iterator[NumberedBatch]:
        """Begin the next pass, or resume the interrupted one after a restore."""
        place, self._place = self._place, None
        if place is None:
            self.progress.leave_pass()
            return self.source.batches()
        batches, digest = self.source.from_place(place)
        self.progress = SourceProgress.restore(place, digest)
        return batches

    def end_pass(self) -> None:
        """Note that the next loop is over another pass."""
        if self.progress.position is not None:
            self.source.order.note_pass(self.progress.position[0])
        self.progress.ended()

    def call_listeners(self) -> None:
        """Call the listeners, between two batches.

        All work on the last batch is dispatched, and the next batch is not yielded yet.
        """
        self.thread = threading.get_ident()
        for function in self.listeners:
            function()

    def send_shards(self, shards: list[Shards]) -> None:
        """Send the shards to the devices before a step needs them."""
        batch = as_global_batch(shards, is_cut=self.placement.replicas > 1)
        for layer in self._plans(batch.rows, batch.sizes).layers:
            for round_ in layer.rounds:
                for array in batch.leaves:  # in the form in which a step asks for them
                    array.on(self._mesh, round_.rows, (self.placement.replicas, round_.size))


class DistributedIterator:
    """One pass over a distributed dataset.

    When the devices have begun with a batch, the next batch is read and sent to them. A generator is the exception: a batch that was
    taken from it and not trained on would be lost.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._batches = dataset.begin_pass()
        self._position: Position | None = None
        """The position of the last batch."""
        self._ahead: list[tuple[NumberedBatch, PyTree]] = []
        self._over = False
        self._error: Exception | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> PyTree:
        with PUBLIC_CALL:
            execution_mode.check_not_tracing()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._dataset.call_listeners()
            try:
                (pass_, number, rows), batch = self._ahead.pop() if self._ahead else self._read_batch()
            except StopIteration:
                if not self._over:
                    self._over = True
                    self._dataset.end_pass()
                raise
            self._position = pass_, number
            if self._dataset.placement.replicas > 1:
                first = list_shards(batch)[0]
                self._dataset.small_batches.note(first.shape[0], self._position, first.sizes)
            self._dataset.progress.note_trained(rows, self._position, self._dataset.source.size)
            return batch

    def _read_batch(self) -> tuple[NumberedBatch, PyTree]:
        """Read the next batch, as the source gives it and as `Shards`."""
        pass_, number, batch = next(self._batches)
        myself = weakref.ref(self)  # a batch must not keep the batches after it alive

        def begun() -> None:
            iterator = myself()
            if iterator is not None:
                iterator.read_ahead((pass_, number))

        shards = jax.tree.map(lambda rows: Shards(rows, self._dataset.placement, begun), batch)
        return (pass_, number, batch), shards

    def read_ahead(self, position: Position) -> None:
        """Read and send the batch after this position.

        Nothing is read if the pass ends there. An error is raised when that batch is asked for.
        """
        source = self._dataset.source
        is_next = self._position == position and position[1] + 1 != source.num_batches
        if self._ahead or self._error or source.is_stream or not is_next:
            return
        try:
            self._ahead = [self._read_batch()]
            self._dataset.send_shards(list_shards(self._ahead[0][1]))
        except StopIteration:
            return
        except Exception as error:  # of the source; it is raised when its batch is asked for
            self._error = error


def list_shards(batch: PyTree) -> list[Shards]:
    return jax.tree.leaves(batch, is_leaf=is_batch_array)


def refuse_distributed_dataset(dataset: UserObject) -> UserObject:
    """Refuse a dataset that is distributed already; else pass it on."""
    refuse_tensorflow_data(dataset, "strategy.distribute_dataset")
    parts = dataset if isinstance(dataset, list | tuple) else [dataset]
    if any(isinstance(part, DistributedDataset | DistributedIterator) for part in parts):
        raise ValueError("The dataset is distributed already: iterate over it, or give it to fit.")
    if parts and isinstance(dataset, list | tuple):
        refuse_distributed_batch(parts[0])
    return dataset
