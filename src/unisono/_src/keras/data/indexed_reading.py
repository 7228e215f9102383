"""Reading one of Keras' adapters. One with an index is read in an order that we decide, a stream in its own order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import keras
import numpy as np

from unisono._src.engine.global_batch import select_rows
from unisono._src.keras.data.row_order import RowOrder
from unisono._src.keras.private.data_adapters import (
    ArrayDataAdapter,
    DataAdapter,
    PyDatasetAdapter,
    get_array_order,
    is_map_dataset,
    iterate_array_batches,
    iterate_map_batches,
    stop_workers,
)
from unisono._src.typing import UserBatch

EVERYTHING = slice(0, None, 1)
"""All batches of a pass."""


def read_batches(source: DataAdapter, order: RowOrder, pass_: int, chosen: slice = EVERYTHING) -> Iterable[UserBatch]:
    """Read chosen global batches of a pass over a source. All are chosen for a source without an index."""
    if isinstance(source, ArrayDataAdapter):
        return read_arrays(source, order, pass_, chosen)
    if isinstance(source, PyDatasetAdapter):
        return read_dataset(source, order, pass_, chosen)
    if chosen != EVERYTHING and is_map_dataset(source):
        return iterate_map_batches(source, chosen)
    return source.get_jax_iterator()


def has_index(source: DataAdapter) -> bool:
    """Whether a later batch can be read without the earlier ones."""
    return isinstance(source, ArrayDataAdapter | PyDatasetAdapter) or is_map_dataset(source)


def changes_with_epochs(source: DataAdapter) -> bool:
    """Whether the source is a PyDataset that may change between epochs.

    It may change in the hooks that Keras calls when an epoch begins or ends.
    """
    if not isinstance(source, PyDatasetAdapter):
        return False
    dataset = source.py_dataset
    return changes_at_begin(dataset) or type(dataset).on_epoch_end is not keras.utils.PyDataset.on_epoch_end


def changes_at_begin(dataset: keras.utils.PyDataset) -> bool:
    """Whether a dataset may change when a pass begins. Its size may change too."""
    return type(dataset).on_epoch_begin is not keras.utils.PyDataset.on_epoch_begin


def read_arrays(adapter: ArrayDataAdapter, order: RowOrder, pass_: int, chosen: slice) -> Iterator[UserBatch]:
    """Read the batches of arrays. Keras shuffles them by NumPy's global generator; here the pass and the batch decide."""
    count, shuffle = get_array_order(adapter)
    permutation = order.permute_pass(pass_, count) if shuffle and shuffle != "batch" else None

    def rows_of_batch(batch: int, begin: int, end: int) -> slice | np.ndarray:
        if shuffle == "batch":
            return begin + order.permute_batch(pass_, batch, end - begin)
        return slice(begin, end) if permutation is None else permutation[begin:end]

    return iterate_array_batches(adapter, rows_of_batch, select_rows, chosen)


def read_dataset(adapter: PyDatasetAdapter, order: RowOrder, pass_: int, chosen: slice) -> Iterator[UserBatch]:
    """Yield the batches of a PyDataset, with new workers for each pass.

    Keras leaves a pass after it has looked at the first batch. The workers of such a pass would leave their batches to the next one.
    """
    dataset = adapter.py_dataset
    count = dataset.num_batches
    if count is None:
        dataset = EndlessDataset(dataset, chosen) if chosen != EVERYTHING else dataset
    elif adapter.shuffle or chosen != EVERYTHING:
        dataset = ReorderedDataset(dataset, (order.permute_pass(pass_, count) if adapter.shuffle else range(count))[chosen])
        if not len(dataset.order):
            return
    pass_adapter = type(adapter)(dataset, class_weight=adapter.class_weight)
    try:
        yield from pass_adapter.get_jax_iterator()
    finally:
        stop_workers(pass_adapter)


class ReorderedDataset(keras.utils.PyDataset):
    """A PyDataset whose batches come in another order."""

    def __init__(self, dataset: keras.utils.PyDataset, order: Sequence[int] | np.ndarray) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self.dataset = dataset
        self.order = order

    def __getitem__(self, index: int) -> UserBatch:
        return self.dataset[int(self.order[index])]

    @property
    def num_batches(self) -> int:
        return len(self.order)


class EndlessDataset(keras.utils.PyDataset):
    """Chosen batches of a PyDataset without an end."""

    def __init__(self, dataset: keras.utils.PyDataset, chosen: slice) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self.dataset = dataset
        self.chosen = chosen

    def __getitem__(self, index: int) -> UserBatch:
        return self.dataset[self.chosen.start + index * self.chosen.step]

    @property
    def num_batches(self) -> int | None:
        return None if self.chosen.stop is None else len(range(self.chosen.stop)[self.chosen])


class PassHooks(Protocol):
    """A dataset or adapter that is told when passes begin and end."""

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...


def find_hooks(source: DataAdapter) -> PassHooks:
    """Find the object whose hooks are called for a pass. For a PyDataset it is the dataset alone: we start its workers."""
    return source.py_dataset if isinstance(source, PyDatasetAdapter) else source
