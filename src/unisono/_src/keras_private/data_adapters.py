"""Keras' data adapters, and its iterator over an epoch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

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
from keras.src.trainers.epoch_iterator import EpochIterator

from unisono._src.keras_private.instances import wrapped_method

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
DataAdapter = data_adapter.DataAdapter
PyDatasetAdapter = py_dataset_adapter.PyDatasetAdapter
unpack = data_adapter_utils.unpack_x_y_sample_weight


def array_batches(
    adapter: Any, rows_of_batch: Callable[[int, int, int], Any], chosen: Callable[[np.ndarray, Any], Any], first: int = 0
) -> Iterator[Any]:
    """Keras' batches of arrays from a first one on.

    Args:
        rows_of_batch: (batch, start, stop) to its rows.
        chosen: (an array of NumPy, rows) to those rows. Others are taken and converted by Keras.
    """

    def iterator(slice_and_convert: Callable[..., Any], inputs: Any) -> Iterator[Any]:
        def taken(rows: Any, sliceable: Any) -> Any:
            if type(sliceable) is array_slicing.NumpySliceable:
                return chosen(sliceable.array, rows)
            return slice_and_convert(sliceable, indices=rows)

        for b in range(first, adapter._size):
            start = b * adapter._batch_size
            rows = rows_of_batch(b, start, min(start + adapter._batch_size, adapter._num_samples))
            yield keras.tree.map_structure(functools.partial(taken, rows), inputs, none_is_leaf=False)

    with wrapped_method(adapter, "_get_iterator", lambda _: iterator):
        return adapter.get_jax_iterator()


def array_order(adapter: Any) -> tuple[int, Any]:
    """(number of rows, shuffle argument) of an adapter of arrays."""
    return adapter._num_samples, adapter._shuffle


def tf_dataset(adapter: Any) -> Any:
    return adapter._dataset


def is_map_dataset(adapter: Any) -> bool:
    """Whether it reads a `grain.MapDataset`, whose batches have an index."""
    return isinstance(adapter, data_adapters.GrainDatasetAdapter) and hasattr(adapter._dataset, "__getitem__")


def map_batches(adapter: Any, start: int) -> Iterator[Any]:
    """The batches of a `grain.MapDataset` from one on, as Keras converts them."""
    return iter(adapter.get_jax_iterator()[start:])


def is_pipeline(dataset: Any) -> bool:
    """A dataset of grain, tf.data or torch, which Keras reads by an adapter of its own."""
    return any(
        is_one(dataset)
        for is_one in (data_adapters.is_tf_dataset, data_adapters.is_torch_dataloader, data_adapters.is_grain_dataset)
    )


def loader_of_torch(adapter: Any) -> Any | None:
    """The DataLoader of torch that an adapter reads; None of another source."""
    return getattr(adapter, "_dataloader", None)


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


class Epochs:
    """Takes over how Keras' loop goes through the steps of an epoch."""

    def __init__(self, iterator: EpochIterator) -> None:
        self._iterator: Any = iterator
        self._stock = iterator._enumerate_iterator
        self._size: Callable[[int], int] | None = None
        self._group: Any = None
        self._begin: tuple[int, Iterator[Any], int] | None = None
        object.__setattr__(iterator, "_enumerate_iterator", self._steps)

    def in_groups(self, size: Callable[[int], int], group: Callable[[Iterator[Any], int], Any]) -> None:
        """Several batches at a time, as with `steps_per_execution`, but as many as `size(step)` says each time, none of them over the
        end of the epoch. The steps get `group(batches, count)` in place of the iterator."""
        self._size, self._group = size, group

    def begin_at(self, step: int, batches: Iterator[Any], read: int) -> None:
        """The next epoch begins with this step and these batches, of whose pass so many were read before.

        Where no batch is left, the step before comes again, with `NoStep` in place of batches: Keras ends an epoch by what its
        last step has said.
        """
        self._begin = step, batches, read

    @property
    def adapter(self) -> Any:
        return self._iterator.data_adapter

    @property
    def steps(self) -> int | None:
        """In an epoch, where that is known."""
        return self._iterator.num_batches

    def pass_is_over(self, read: int) -> bool:
        """At the end of an epoch: whether the next one begins with the first batch of another pass, if so many were read of this."""
        iterator, length = self._iterator, self._iterator._num_batches
        return iterator.steps_per_epoch is None or iterator._current_iterator is None or bool(length and read >= length)

    def _steps(self) -> Iterator[tuple[int, int, Any]]:
        return self._singles() if self._size is None else self._groups(self._size)

    def _singles(self) -> Iterator[tuple[int, int, Any]]:
        if self._begin is None:
            yield from self._stock()
            return
        (first_step, batches, read), self._begin = self._begin, None
        iterator, ahead = self._iterator, next(batches, None)
        if ahead is None:
            yield first_step - 1, first_step - 1, NoStep()
            return
        batches = itertools.chain([ahead], batches)
        if iterator.steps_per_epoch is None:  # Keras asks for the batches of the pass

            def once() -> Iterator[Any]:
                object.__setattr__(iterator, "_get_iterator", asked)
                return batches

            asked = iterator._get_iterator
            object.__setattr__(iterator, "_get_iterator", once)
        iterator._current_iterator, iterator._steps_seen = batches, read - first_step
        yield from ((begin, end, of) for begin, end, of in self._stock() if begin >= first_step)

    def _groups(self, size: Callable[[int], int]) -> Iterator[tuple[int, int, Any]]:
        singles = self._singles()
        for begin, end, batches in singles:
            if not isinstance(batches, NoStep):
                steps = size(begin)
                while end - begin + 1 < steps and self._more_in_epoch(end + 1):
                    _, end, batches = next(singles)
                batches = self._group(batches, end - begin + 1)
            yield begin, end, batches

    def _more_in_epoch(self, step: int) -> bool:
        # Asked for one too many, Keras' generator would end the epoch before its last batches were read.
        iterator, length = self._iterator, self._iterator._num_batches
        return step < (iterator.steps_per_epoch or length or 0) and not (length and iterator._steps_seen >= length)


class NoStep:
    """In place of batches: nothing is left to train on in this epoch."""


def has_length(iterator: EpochIterator) -> bool:
    return bool(iterator.num_batches)
