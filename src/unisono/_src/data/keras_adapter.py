"""A data adapter around Keras': theirs reads the source, ours owns order and position.

Keras' loops use it as one of their own. It hands out global batches on the host, read one batch ahead where the source can be
read again from its start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from unisono._src import keras_private
from unisono._src.data import indexed_reading
from unisono._src.data.forked_workers import warn_of_forks
from unisono._src.data.global_batch import held
from unisono._src.data.progress import Place, Size
from unisono._src.data.resume import Item, indexed, streamed
from unisono._src.data.row_order import Order


class GlobalBatches(keras_private.DataAdapter):
    """The batches of a Keras adapter, in order by rule, with their positions."""

    def __init__(self, source: Any, order: Order) -> None:
        warn_of_forks(source)
        self.source = source
        self.order = order

    def get_jax_iterator(self, start: int = 0) -> Iterator[Any]:
        batches = (batch for _, _, batch in self._items(start))
        return batches if isinstance(self.source, keras_private.GeneratorDataAdapter) else one_ahead(batches)

    def _items(self, start: int = 0) -> Iterator[Item]:
        pass_ = self.order.passes
        for number, batch in enumerate(indexed_reading.batches(self.source, self.order, start), start):
            yield pass_, number, held(batch, (pass_, number), copy=not isinstance(self.source, keras_private.ArrayDataAdapter))

    def from_place(self, place: Place) -> tuple[Iterator[Any], Any]:
        """(The batches of a pass from there on, the digest of those before if they were read.)"""

        def begin(pass_: int, start: int = 0) -> Iterator[Item]:
            self.order.passes = pass_
            return self._items(start)

        if not self.has_index:
            items, chain = streamed(place, begin, self.size)
            return (batch for _, _, batch in items), chain
        items = indexed(place, begin, functools.partial(indexed_reading.skip, self.source), self.size)
        return one_ahead(batch for _, _, batch in items), None

    @property
    def has_index(self) -> bool:
        """Whether a later batch can be had without those before it."""
        return indexed_reading.has_index(self.source)

    def size(self) -> Size:
        """Of the data, in the pass that it has come to."""
        return indexed_reading.size_of(self.source)

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self.source.get_numpy_iterator()

    @property
    def num_batches(self) -> int | None:
        return self.source.num_batches

    @property
    def batch_size(self) -> int | None:
        return self.source.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self.source.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self.source.partial_batch_size

    def on_epoch_begin(self) -> None:
        indexed_reading.hooks_of(self.source).on_epoch_begin()

    def on_epoch_end(self) -> None:
        indexed_reading.hooks_of(self.source).on_epoch_end()


def one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, each asked for before the one before it is handed out; an error comes in its own turn."""
    nothing = object()
    ready = next(batches, nothing)
    while ready is not nothing:
        error = None
        try:
            ahead = next(batches, nothing)
        except Exception as e:
            error, ahead = e, nothing
        yield ready
        if error is not None:
            raise error
        ready = ahead
