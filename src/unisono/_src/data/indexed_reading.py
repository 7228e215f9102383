"""Reading a source in the order of the rule, where it has an index; as it comes, where it is a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import keras

from unisono._src import keras_private
from unisono._src.data.global_batch import chosen
from unisono._src.data.progress import Size
from unisono._src.data.row_order import Order


def batches(source: Any, order: Order, start: int = 0) -> Iterable[Any]:
    """The global batches of one pass over the source of a Keras adapter; from a later one on only where it has an index."""
    if isinstance(source, keras_private.ArrayDataAdapter):
        return of_arrays(source, order, start)
    if isinstance(source, keras_private.PyDatasetAdapter):
        return of_dataset(source, order, start)
    if start and isinstance(source, Indexed):
        return source.batches_from(start)
    if start and keras_private.is_map_dataset(source):
        return keras_private.map_batches(source, start)
    return source.get_jax_iterator()


def has_index(source: Any) -> bool:
    """Whether a later batch can be had without those before it."""
    known = isinstance(source, keras_private.ArrayDataAdapter | keras_private.PyDatasetAdapter) or keras_private.is_map_dataset(
        source
    )
    return source.has_index if isinstance(source, Indexed) else known


def size_of(source: Any) -> Size:
    """As much of it as the source knows."""
    if isinstance(source, Indexed):
        return source.size()
    if isinstance(source, keras_private.PyDatasetAdapter) and changes_at_begin(source.py_dataset):
        return {}
    rows = keras_private.array_order(source)[0] if isinstance(source, keras_private.ArrayDataAdapter) else None
    return {what: count for what, count in (("batches", source.num_batches), ("rows", rows)) if count is not None}


def changes_at_begin(dataset: keras.utils.PyDataset) -> bool:
    """Whether it may have another size in a pass than just before it."""
    return type(dataset).on_epoch_begin is not keras.utils.PyDataset.on_epoch_begin


@runtime_checkable
class Indexed(Protocol):
    """An adapter that knows by itself how to begin with a later batch."""

    @property
    def has_index(self) -> bool: ...

    def size(self) -> Size: ...

    def batches_from(self, start: int) -> Iterator[Any]: ...

    def skip(self, passes: range) -> None: ...


def skip(source: Any, passes: range) -> None:
    """Takes a source that has an index past some passes: a PyDataset of the user's may change at their ends."""
    if isinstance(source, Indexed):
        source.skip(passes)
        return
    for _ in passes:
        hooks_of(source).on_epoch_begin()
        hooks_of(source).on_epoch_end()


def of_arrays(adapter: Any, order: Order, start: int) -> Iterator[Any]:
    """Keras shuffles arrays by NumPy's global generator; here the pass and the batch decide."""
    count, shuffle = keras_private.array_order(adapter)
    pass_, whole = order.passes, order.of_pass(count) if shuffle and shuffle != "batch" else None

    def rows_of_batch(batch: int, begin: int, end: int) -> Any:
        if shuffle == "batch":
            return begin + order.within_batch(pass_, batch, end - begin)
        return slice(begin, end) if whole is None else whole[begin:end]

    return keras_private.array_batches(adapter, rows_of_batch, chosen, start)


def of_dataset(adapter: Any, order: Order, start: int) -> Iterator[Any]:
    """A PyDataset with workers of its own for each pass: those of a pass that was broken off, as Keras does to look at the
    first batch, would leave their batches to the next."""
    dataset = adapter.py_dataset
    count = dataset.num_batches
    if count is None:
        dataset = Later(dataset, start) if start else dataset
    elif adapter.shuffle or start:
        dataset = Reordered(dataset, (order.of_pass(count) if adapter.shuffle else range(count))[start:])
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


class Later(keras.utils.PyDataset):
    """A PyDataset without an end, from a later batch on."""

    def __init__(self, dataset: Any, start: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self.dataset = dataset
        self.start = start

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.start + index]

    @property
    def num_batches(self) -> None:
        return None


def hooks_of(source: Any) -> Any:
    """What has `on_epoch_begin` and `on_epoch_end`: of a PyDataset the dataset alone, whose workers are ours to start."""
    return source.py_dataset if isinstance(source, keras_private.PyDatasetAdapter) else source
