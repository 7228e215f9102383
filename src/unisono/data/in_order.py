"""Reading a source in the order of the rule, where it has an index; as it comes, where it is a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from unisono import keras_seam
from unisono.data.order import Order


def batches(source: Any, order: Order) -> Iterable[Any]:
    """The global batches of one pass over the source of a Keras adapter."""
    if isinstance(source, keras_seam.ArrayDataAdapter):
        return of_arrays(source, order)
    if isinstance(source, keras_seam.PyDatasetAdapter):
        return of_dataset(source, order)
    return source.get_jax_iterator()


def of_arrays(adapter: Any, order: Order) -> Iterator[Any]:
    """Keras shuffles arrays by NumPy's global generator; here the pass and the batch decide."""
    count, shuffle = keras_seam.array_order(adapter)
    pass_, whole = order.passes, order.of_pass(count) if shuffle and shuffle != "batch" else None

    def rows_of_batch(batch: int, start: int, stop: int) -> Any:
        if shuffle == "batch":
            return start + order.within_batch(pass_, batch, stop - start)
        return slice(start, stop) if whole is None else whole[start:stop]

    return keras_seam.array_batches(adapter, rows_of_batch)


def of_dataset(adapter: Any, order: Order) -> Iterator[Any]:
    """A PyDataset with workers of its own for each pass: those of a pass that was broken off, as Keras does to look at the
    first batch, would leave their batches to the next."""
    dataset = adapter.py_dataset
    if adapter.shuffle and dataset.num_batches is not None:
        dataset = Reordered(dataset, order.of_pass(dataset.num_batches))
    of_pass = type(adapter)(dataset, class_weight=adapter.class_weight)
    try:
        yield from of_pass.get_jax_iterator()
    finally:
        if of_pass.enqueuer is not None:
            of_pass.enqueuer.stop()


class Reordered(keras.utils.PyDataset):
    """A PyDataset whose batches come in another order."""

    def __init__(self, dataset: Any, order: Any) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self.dataset = dataset
        self.order = order

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.order[index])]

    @property
    def num_batches(self) -> int:
        return len(self.order)


def hooks_of(source: Any) -> Any:
    """What has `on_epoch_begin` and `on_epoch_end`: of a PyDataset the dataset alone, whose workers are ours to start."""
    return source.py_dataset if isinstance(source, keras_seam.PyDatasetAdapter) else source
