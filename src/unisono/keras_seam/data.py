"""Keras' data adapters, and its iterator over an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    data_adapter,
    data_adapter_utils,
    get_data_adapter,
    py_dataset_adapter,
)
from keras.src.trainers.epoch_iterator import EpochIterator

from unisono.keras_seam.instances import wrapped_method

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
DataAdapter = data_adapter.DataAdapter
PyDatasetAdapter = py_dataset_adapter.PyDatasetAdapter
unpack = data_adapter_utils.unpack_x_y_sample_weight


def array_batches(adapter: Any, rows_of_batch: Callable[[int, int, int], Any]) -> Iterator[Any]:
    """Keras' batches of arrays, with the rows of batch b (start, stop) as `rows_of_batch(b, start, stop)` says."""

    def iterator(slice_and_convert: Callable[..., Any], inputs: Any) -> Iterator[Any]:
        for b in range(adapter._size):
            start = b * adapter._batch_size
            rows = rows_of_batch(b, start, min(start + adapter._batch_size, adapter._num_samples))
            yield keras.tree.map_structure(lambda s, rows=rows: slice_and_convert(s, indices=rows), inputs, none_is_leaf=False)

    with wrapped_method(adapter, "_get_iterator", lambda _: iterator):
        return adapter.get_jax_iterator()


def array_order(adapter: Any) -> tuple[int, Any]:
    """(number of rows, shuffle argument) of an adapter of arrays."""
    return adapter._num_samples, adapter._shuffle


def tf_dataset(adapter: Any) -> Any:
    return adapter._dataset


def is_pipeline(dataset: Any) -> bool:
    """A dataset of grain, tf.data or torch, which Keras reads by an adapter of its own."""
    return any(
        is_one(dataset)
        for is_one in (data_adapters.is_tf_dataset, data_adapters.is_torch_dataloader, data_adapters.is_grain_dataset)
    )


def adapter_of(x: Any, batch_size: int | None, steps: int | None) -> Any:
    """Keras' adapter for inputs without targets."""
    return get_data_adapter(x, batch_size=batch_size, steps_per_epoch=steps)


def first_batch(iterator: Any) -> Any:
    """The first batch; the iterator goes back to its start."""
    _, _, batches = next(iter(iterator))
    batch = next(batches)
    iterator.reset()
    return batch


def static_rows(model: Any) -> int | None:
    """The number of rows that the model's inputs fix, by `Input(batch_size=...)`; None where they are free.

    A Sequential model that was built by a batch has that batch's rows in its inputs, and means nothing by it.
    """
    inputs = keras.tree.flatten(model.inputs) if isinstance(model, Functional) else []
    return next((tensor.shape[0] for tensor in inputs if tensor.shape and tensor.shape[0] is not None), None)


def replace_adapter(iterator: EpochIterator, adapt: Callable[[Any], Any]) -> None:
    iterator.data_adapter = adapt(iterator.data_adapter)
    # Keras would send whole batches to the first device, ahead of time, where that is no CPU.
    object.__setattr__(iterator, "_get_iterator", iterator.data_adapter.get_jax_iterator)


def in_groups(iterator: EpochIterator, size: Callable[[], int], group: Callable[[Iterator[Any], int], Any]) -> None:
    """Has Keras' loop take several batches at a time, as with `steps_per_execution`, but as many as `size()` says each time,
    none of them over the end of the epoch. The steps get `group(batches, count)` in place of the iterator."""
    single = iterator._enumerate_iterator

    def groups() -> Iterator[tuple[int, int, Iterator[Any]]]:
        singles = single()
        for begin, end, batches in singles:
            steps = size()
            while end - begin + 1 < steps and more_in_epoch(end + 1):
                _, end, batches = next(singles)
            yield begin, end, group(batches, end - begin + 1)

    def more_in_epoch(step: int) -> bool:
        # Asked for one too many, Keras' generator would end the epoch before its last batches were read.
        length, seen = iterator._num_batches, iterator._steps_seen
        return step < (iterator.steps_per_epoch or length or 0) and not (length and seen >= length)

    object.__setattr__(iterator, "_enumerate_iterator", groups)


def has_length(iterator: EpochIterator) -> bool:
    return bool(iterator.num_batches)
