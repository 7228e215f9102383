"""Distributed datasets: global batches of which each replica will get its rows, read and sent ahead."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from unisono._src import execution_mode
from unisono._src.data.global_batch import Position, is_whole
from unisono._src.data.progress import Place, Progress, restored
from unisono._src.data.resume import Item
from unisono._src.distributed import batch_sources, replicated
from unisono._src.distributed.batch_sources import OfSource, Source
from unisono._src.distributed.per_replica import Shards
from unisono._src.placement import Placement
from unisono._src.step.plan import plan


class DistributedDataset:
    """Global batches; iterate over it as often as you like.

    `len()` is the number of batches, where the source knows it.
    """

    def __init__(self, source: Source, placement: Placement) -> None:
        self.source = source
        self.progress = Progress()
        self.listeners: list[Callable[[], None]] = []
        """Called between two batches."""
        self.thread: int | None = None
        """In which the last batch was asked for."""
        self._place: Place | None = None
        self._placement = placement
        self._warned = False
        self._plans = functools.cache(functools.partial(plan, placement=placement))

    def __iter__(self) -> DistributedIterator:
        execution_mode.check()
        return DistributedIterator(self)

    @property
    def position(self) -> Position:
        """(passes that were begun before this one, batches of this one that were handed out)"""
        return self.progress.position or (0, 0)

    def will_be_saved(self) -> None:
        """Before it is trained on: of a stream, every batch then counts for the digest."""
        if not self.source.has_index:
            self.progress.count_all()

    def get_state(self) -> dict[str, Any]:
        """Where it is, in JSON."""
        place = self._place or self.progress.place
        return {"seeds": self.source.seeds, "place": None if place is None else place._asdict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """The next loop over it goes on there."""
        self.source.seeds = state["seeds"]
        self._place = None if state["place"] is None else Place.of_json(state["place"])
        if self._place is None:  # before the first batch
            self.progress, self.source.order.passes = Progress(), 0

    def begin(self) -> Iterator[Item]:
        """The batches of a pass: of the next one, or after a restore the rest of the one that was interrupted."""
        place, self._place = self._place, None
        if place is None:
            return self.source.batches()
        items, chain = self.source.from_place(place)
        self.progress = restored(place, chain)
        return items

    def pass_is_over(self) -> None:
        """The next loop is over another pass."""
        if self.progress.position is not None:
            self.source.order.trained_on(self.progress.position[0])
        self.progress.ended()

    def between_batches(self) -> None:
        """Called before a batch is handed out, when all that was done with the one before it is asked for."""
        self.thread = threading.get_ident()
        for function in self.listeners:
            function()

    def handed_out(self, batch: Any, begun: Callable[[], None]) -> Any:
        """For the replicas. `begun` is called when the devices have begun with it."""
        return jax.tree.map(lambda rows: Shards(rows, self._placement, begun), batch, is_leaf=is_whole)

    def send(self, shards: list[Shards]) -> None:
        """To the devices, before they are asked for."""
        parts = self._plans(shards[0].shape[0], shards[0].sizes).parts
        runs = [(part.device, run) for part in parts for run in part.runs]
        for array in shards:
            array.send(runs)

    def check_size(self, shards: list[Shards]) -> None:
        """Of a batch that is not the last."""
        rows, sizes = shards[0].shape[0], shards[0].sizes
        if sizes is None and rows < self.replicas and not self._warned:
            self._warned = True
            warnings.warn(
                f"A batch of {rows} rows for {self.replicas} replicas, and more batches behind it: replicas without rows have nothing to "
                f"do. A distributed dataset has global batches: if these are a replica's, make them {self.replicas} times as large.",
                stacklevel=3,
            )

    def __len__(self) -> int:
        length = self.source.length
        if length is None:
            raise TypeError("This dataset does not know how many batches it has. Count them as they come.")
        return length

    @property
    def adapter(self) -> OfSource:
        """For Keras' loops."""
        return OfSource(self.source)

    @property
    def replicas(self) -> int:
        """Of the strategy that distributes it."""
        return self._placement.replicas


class DistributedIterator:
    """One pass over a distributed dataset.

    When the devices have begun with a batch, the next one is read and sent to them, except from a generator: a batch that was
    taken from one and not trained on would be lost.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._batches = dataset.begin()
        self._position: Position | None = None
        """Of the last batch."""
        self._last: list[Shards] | None = None
        self._ahead: list[tuple[Item, Any]] = []
        self._over = False
        self._error: BaseException | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        execution_mode.check()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._dataset.between_batches()
        try:
            (pass_, number, rows), batch = self._ahead.pop() if self._ahead else self._read()
        except StopIteration:
            if not self._over:
                self._over = True
                self._dataset.pass_is_over()
            raise
        self._position = pass_, number
        if self._last is not None:
            self._dataset.check_size(self._last)
        self._last = leaves_of(batch)
        self._dataset.progress.trained(rows, self._position, self._dataset.source.size)
        return batch

    def _read(self) -> tuple[Item, Any]:
        pass_, number, batch = next(self._batches)
        myself = weakref.ref(self)  # who holds a batch need not hold what comes after it

        def begun() -> None:
            iterator = myself()
            if iterator is not None:
                iterator.look_ahead((pass_, number))

        return (pass_, number, batch), self._dataset.handed_out(batch, begun)

    def look_ahead(self, position: Position) -> None:
        """Reads the batch behind this one, if that is not known to be the last, and sends it. An error comes in its turn."""
        source = self._dataset.source
        if self._ahead or self._error or self._position != position or source.is_stream or position[1] + 1 == source.length:
            return
        try:
            self._ahead = [self._read()]
            self._dataset.send(leaves_of(self._ahead[0][1]))
        except StopIteration:
            return
        except Exception as error:
            self._error = error


def leaves_of(batch: Any) -> list[Shards]:
    return jax.tree.leaves(batch, is_leaf=is_whole)


def undistributed(dataset: Any) -> Any:
    """What a user wants to distribute, unless that was done already."""
    replicated.check_not_tensorflows(dataset, "strategy.distribute_dataset")
    parts = dataset if isinstance(dataset, list | tuple) else [dataset]
    if any(isinstance(part, DistributedDataset | DistributedIterator) for part in parts):
        raise ValueError("The dataset is distributed already: iterate over it, or give it to fit.")
    if parts and isinstance(dataset, list | tuple):
        batch_sources.undistributed(parts[0])
    return dataset
