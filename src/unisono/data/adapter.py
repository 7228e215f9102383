"""A data adapter around Keras': theirs reads the source, ours owns order, position and division.

Keras' loops use it as one of their own. It hands out global batches that are divided and on their way to the devices, one
batch ahead where the source can be read again from its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from unisono import keras_seam
from unisono.data.division import divide
from unisono.data.order import Order
from unisono.placement import Placement


class GlobalBatches(keras_seam.DataAdapter):
    """The batches of a Keras adapter, in order by rule, divided among the replicas."""

    def __init__(self, source: Any, placement: Placement, order: Order) -> None:
        self.source = reordered(source, order) if isinstance(source, keras_seam.PyDatasetAdapter) else source
        self.placement = placement
        self.order = order
        self._in_pass = False

    def get_jax_iterator(self) -> Iterator[Any]:
        batches = self._divided()
        return batches if isinstance(self.source, keras_seam.GeneratorDataAdapter) else one_ahead(batches)

    def _divided(self) -> Iterator[Any]:
        self._begin_pass()
        pass_ = self.order.passes
        try:
            for number, batch in enumerate(self._batches()):
                yield divide(batch, self.placement, (pass_, number))
        finally:
            self._in_pass = False

    def _begin_pass(self) -> None:
        """Fixes the order of the pass; an epoch of fewer steps than the data has goes on with the pass that it is in."""
        if not self._in_pass and isinstance(self.source, keras_seam.PyDatasetAdapter):
            if isinstance(self.source.py_dataset, Reordered):
                self.source.py_dataset.begin_pass()
        self._in_pass = True

    def _batches(self) -> Iterable[Any]:
        if not isinstance(self.source, keras_seam.ArrayDataAdapter):
            return self.source.get_jax_iterator()
        count, shuffle = keras_seam.array_order(self.source)
        pass_, whole = self.order.passes, self.order.of_pass(count) if shuffle and shuffle != "batch" else None

        def rows_of_batch(batch: int, start: int, stop: int) -> Any:
            if shuffle == "batch":
                return start + self.order.within_batch(pass_, batch, stop - start)
            return slice(start, stop) if whole is None else whole[start:stop]

        return keras_seam.array_batches(self.source, rows_of_batch)

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
        before = self._in_pass
        self._begin_pass()  # before Keras starts the workers of a PyDataset, which keep what they see now
        self._in_pass = before
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.source.on_epoch_end()


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


class Reordered(keras.utils.PyDataset):
    """A PyDataset whose batches come in the order of the pass that was begun last."""

    def __init__(self, dataset: Any, order: Order) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self.dataset = dataset
        self.order = order
        self.begin_pass()

    def begin_pass(self) -> None:
        self.of_pass = self.order.of_pass(self.num_batches)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.of_pass[index])]

    @property
    def num_batches(self) -> int:
        return self.dataset.num_batches

    def on_epoch_begin(self) -> None:
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()


def reordered(adapter: Any, order: Order) -> Any:
    """The adapter with its shuffle, which draws from Python's random generator, replaced by the rule."""
    if not adapter.shuffle or adapter.num_batches is None:
        return adapter
    return type(adapter)(Reordered(adapter.py_dataset, order), class_weight=adapter.class_weight)
