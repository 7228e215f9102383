"""Keras' data adapters, and what its epoch iterator reads."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Protocol, TypeAlias, TypeGuard

import keras
import numpy as np
from keras.src.models.functional import Functional
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter,
    data_adapter_utils,
    get_data_adapter,
    py_dataset_adapter,
)
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter as GeneratorDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.rng_utils import get_random_seed as get_random_seed

from unisono._src.engine.row_counts import unwrap_batch
from unisono._src.keras.private.instances import Method, wrap_method
from unisono._src.typing import KerasObject, Keywords, PyTree, UserBatch, UserObject

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
DataAdapter = data_adapter.DataAdapter
PyDatasetAdapter = py_dataset_adapter.PyDatasetAdapter
RowNumbers: TypeAlias = slice | np.ndarray
"""Rows of an array: a range of them, or their numbers."""


class TorchLoader(Protocol):
    """A DataLoader of torch."""

    num_workers: int
    multiprocessing_context: BaseContext | None
    sampler: UserObject
    batch_sampler: UserObject


def unpack_batch(batch: UserBatch) -> tuple[PyTree, PyTree, PyTree]:
    """Split a batch into (x, y, sample weights). A missing part is None."""
    return data_adapter_utils.unpack_x_y_sample_weight(unwrap_batch(batch))


def iterate_array_batches(
    adapter: ArrayDataAdapter,
    rows_of_batch: Callable[[int, int, int], RowNumbers],
    chosen: Callable[[np.ndarray, RowNumbers], object],
    batches: slice,
) -> Iterator[UserBatch]:
    """Iterate over chosen ones of Keras' batches of arrays.

    Args:
        rows_of_batch: Returns the rows of a batch, from (batch, start, stop).
        chosen: Returns the rows of an array of NumPy, from (array, rows). Keras slices and converts other arrays.
    """

    def iterator(slice_and_convert: Method, inputs: PyTree) -> Iterator[UserBatch]:
        def take_rows(rows: RowNumbers, sliceable: array_slicing.Sliceable) -> object:
            if type(sliceable) is array_slicing.NumpySliceable:
                return chosen(sliceable.array, rows)
            return slice_and_convert(sliceable, indices=rows)

        for batch in range(adapter._size)[batches]:
            start = batch * adapter._batch_size
            rows = rows_of_batch(batch, start, min(start + adapter._batch_size, adapter._num_samples))
            yield keras.tree.map_structure(functools.partial(take_rows, rows), inputs, none_is_leaf=False)

    with wrap_method(adapter, "_get_iterator", lambda _: iterator):
        return adapter.get_jax_iterator()


def get_array_order(adapter: ArrayDataAdapter) -> tuple[int, bool | str]:
    """The number of rows and the shuffle argument of an array adapter."""
    return adapter._num_samples, adapter._shuffle


def get_tf_dataset(adapter: data_adapters.TFDatasetAdapter) -> UserObject:
    """The dataset of tf.data that an adapter reads."""
    return adapter._dataset


def is_map_dataset(adapter: object) -> TypeGuard[data_adapters.GrainDatasetAdapter]:
    """Whether an adapter reads a `grain.MapDataset` whose batches have an index.

    One that leaves out batches is a stream: its indices count those, too.
    """
    if not isinstance(adapter, data_adapters.GrainDatasetAdapter):
        return False
    return hasattr(adapter._dataset, "__getitem__") and not leaves_out_elements(adapter._dataset)


def leaves_out_elements(dataset: KerasObject) -> bool:
    """Whether elements of a `grain.MapDataset` may be missing. By the same names grain refuses to batch them."""
    parents: KerasObject = getattr(dataset, "parents", ())  # a class of the user's own may not have called that of grain
    return type(dataset).__name__ in ("FilterMapDataset", "FlatMapMapDataset") or any(map(leaves_out_elements, parents))


def iterate_map_batches(adapter: data_adapters.GrainDatasetAdapter, batches: slice) -> Iterator[UserBatch]:
    """Iterate over chosen batches of a `grain.MapDataset`. Keras converts them."""
    return iter(adapter.get_jax_iterator()[batches])


def is_pipeline(dataset: UserObject) -> bool:
    """Whether the dataset is one of grain, tf.data or torch. Keras has adapters for these."""
    return any(
        is_one(dataset)
        for is_one in (data_adapters.is_tf_dataset, data_adapters.is_torch_dataloader, data_adapters.is_grain_dataset)
    )


def find_torch_loader(adapter: object) -> TorchLoader | None:
    """Find the torch DataLoader that an adapter reads. None if it reads another source."""
    return adapter._dataloader if isinstance(adapter, data_adapters.TorchDataLoaderAdapter) else None


def make_adapter(x: UserObject, batch_size: int | None, steps: int | None) -> DataAdapter:
    """Make Keras' adapter for inputs without targets."""
    return get_data_adapter(x, batch_size=batch_size, steps_per_epoch=steps)


def read_first_batch(iterator: KerasObject) -> UserBatch:
    """Read the first batch, and reset the iterator to its start."""
    _, _, batches = next(iter(iterator))
    batch = next(batches)
    iterator.reset()
    return batch


def count_static_rows(model: keras.Model) -> int | None:
    """Read the batch size that the model's inputs fix. None if it is free.

    `Input(batch_size=...)` fixes it.

    A Sequential model that was built by a batch has the rows of this batch in its inputs, but they fix nothing.
    """
    inputs = keras.tree.flatten(model.inputs) if isinstance(model, Functional) else []
    return next((tensor.shape[0] for tensor in inputs if tensor.shape and tensor.shape[0] is not None), None)


def replace_adapter(iterator: EpochIterator, adapt: Callable[[DataAdapter], DataAdapter]) -> None:
    """Replace the adapter of an epoch iterator by `adapt(adapter)`."""
    iterator.data_adapter = adapt(iterator.data_adapter)
    # Keras would send whole batches to the first device, ahead of time, unless it is a CPU.
    object.__setattr__(iterator, "_get_iterator", iterator.data_adapter.get_jax_iterator)


def stop_workers(adapter: PyDatasetAdapter) -> None:
    """Stop the workers of one pass.

    Nobody waits for batches that are not read: when a program ends, or is interrupted, they may never come.
    """
    enqueuer: KerasObject = adapter.enqueuer
    if enqueuer is None:
        return
    enqueuer.stop(drain_queue_and_join=False)
    with contextlib.suppress(queue.Empty):  # the thread that asks workers for batches ends when it finds room for one more
        while True:
            enqueuer.future_queue.get_nowait()


def is_call_of_fit(keywords: Keywords) -> bool:
    """Whether these keywords of `evaluate` come from `fit`'s validation.

    `fit` keeps its validation iterator from epoch to epoch.
    """
    return bool(keywords.get("_use_cached_eval_dataset"))


def has_known_length(iterator: EpochIterator) -> bool:
    return bool(iterator.num_batches)
