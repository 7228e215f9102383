"""Keras' data adapters, and its iterator over an epoch."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
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

from unisono._src.keras_private.instances import Method, wrap_method
from unisono._src.typing import KerasObject, Keywords, PyTree, UserBatch, UserObject
from unisono._src.whole_batch import unwrap_batch

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
DataAdapter = data_adapter.DataAdapter
PyDatasetAdapter = py_dataset_adapter.PyDatasetAdapter
RowNumbers: TypeAlias = slice | np.ndarray
"""Rows of an array: a range of them, or their numbers."""

Batches: TypeAlias = "Iterator[UserBatch] | NoStep"
"""The batches of a step."""


class TorchLoader(Protocol):
    """A DataLoader of torch."""

    num_workers: int
    multiprocessing_context: BaseContext | None
    sampler: UserObject
    batch_sampler: UserObject


def unpack_batch(batch: UserBatch) -> tuple[PyTree, PyTree, PyTree]:
    """Return (x, y, sample weights) of a batch; None for what it has not."""
    return data_adapter_utils.unpack_x_y_sample_weight(unwrap_batch(batch))


def iterate_array_batches(
    adapter: ArrayDataAdapter,
    rows_of_batch: Callable[[int, int, int], RowNumbers],
    chosen: Callable[[np.ndarray, RowNumbers], object],
    first: int = 0,
) -> Iterator[UserBatch]:
    """Return Keras' batches of arrays, from batch `first` on.

    Args:
        rows_of_batch: Returns the rows of a batch, from (batch, start, stop).
        chosen: Returns the rows of an array of NumPy, from (array, rows). Keras slices and converts other arrays.
    """

    def iterator(slice_and_convert: Method, inputs: PyTree) -> Iterator[UserBatch]:
        def take_rows(rows: RowNumbers, sliceable: array_slicing.Sliceable) -> object:
            if type(sliceable) is array_slicing.NumpySliceable:
                return chosen(sliceable.array, rows)
            return slice_and_convert(sliceable, indices=rows)

        for batch in range(first, adapter._size):
            start = batch * adapter._batch_size
            rows = rows_of_batch(batch, start, min(start + adapter._batch_size, adapter._num_samples))
            yield keras.tree.map_structure(functools.partial(take_rows, rows), inputs, none_is_leaf=False)

    with wrap_method(adapter, "_get_iterator", lambda _: iterator):
        return adapter.get_jax_iterator()


def get_array_order(adapter: ArrayDataAdapter) -> tuple[int, bool | str]:
    """Return (number of rows, shuffle argument) of an adapter of arrays."""
    return adapter._num_samples, adapter._shuffle


def get_tf_dataset(adapter: data_adapters.TFDatasetAdapter) -> UserObject:
    """Return the dataset of tf.data that an adapter reads."""
    return adapter._dataset


def is_map_dataset(adapter: object) -> TypeGuard[data_adapters.GrainDatasetAdapter]:
    """Return whether an adapter reads a `grain.MapDataset`, whose batches have an index."""
    return isinstance(adapter, data_adapters.GrainDatasetAdapter) and hasattr(adapter._dataset, "__getitem__")


def iterate_map_batches(adapter: data_adapters.GrainDatasetAdapter, start: int) -> Iterator[UserBatch]:
    """Return the batches of a `grain.MapDataset` from batch `start` on, as Keras converts them."""
    return iter(adapter.get_jax_iterator()[start:])


def is_pipeline(dataset: UserObject) -> bool:
    """Return whether the dataset is one of grain, tf.data or torch, for which Keras has adapters."""
    return any(
        is_one(dataset)
        for is_one in (data_adapters.is_tf_dataset, data_adapters.is_torch_dataloader, data_adapters.is_grain_dataset)
    )


def find_torch_loader(adapter: object) -> TorchLoader | None:
    """Return the DataLoader of torch that an adapter reads; None if it reads another source."""
    return adapter._dataloader if isinstance(adapter, data_adapters.TorchDataLoaderAdapter) else None


def make_adapter(x: UserObject, batch_size: int | None, steps: int | None) -> DataAdapter:
    """Return Keras' adapter for inputs without targets."""
    return get_data_adapter(x, batch_size=batch_size, steps_per_epoch=steps)


def read_first_batch(iterator: KerasObject) -> UserBatch:
    """Return the first batch, and move the iterator back to its start."""
    _, _, batches = next(iter(iterator))
    batch = next(batches)
    iterator.reset()
    return batch


def count_static_rows(model: keras.Model) -> int | None:
    """Return the number of rows that the model's inputs fix, by `Input(batch_size=...)`; None if the number is free.

    A Sequential model that was built by a batch has the rows of this batch in its inputs, but they fix nothing.
    """
    inputs = keras.tree.flatten(model.inputs) if isinstance(model, Functional) else []
    return next((tensor.shape[0] for tensor in inputs if tensor.shape and tensor.shape[0] is not None), None)


def replace_adapter(iterator: EpochIterator, adapt: Callable[[DataAdapter], DataAdapter]) -> None:
    """Replace the adapter of an iterator over an epoch by `adapt(adapter)`."""
    iterator.data_adapter = adapt(iterator.data_adapter)
    # Keras would send whole batches to the first device, ahead of time, unless it is a CPU.
    object.__setattr__(iterator, "_get_iterator", iterator.data_adapter.get_jax_iterator)


def stop_workers(adapter: PyDatasetAdapter) -> None:
    """Stop the workers of one pass. Nobody waits for batches that are not read: when a program ends, or is interrupted, they may never come."""
    enqueuer: KerasObject = adapter.enqueuer
    if enqueuer is None:
        return
    enqueuer.stop(drain_queue_and_join=False)
    with contextlib.suppress(queue.Empty):  # the thread that asks workers for batches ends when it finds room for one more
        while True:
            enqueuer.future_queue.get_nowait()


class EpochSteps:
    """Control over the way in which Keras' loop goes through the steps of an epoch."""

    def __init__(self, iterator: EpochIterator) -> None:
        self._iterator: KerasObject = iterator
        self._stock = iterator._enumerate_iterator
        self._grouping: tuple[Callable[[int], int], Callable[[Iterator[UserBatch], int], Iterator[UserBatch]]] | None = None
        self._begin: tuple[int, Iterator[UserBatch], int, Callable[[], None] | None] | None = None
        self._loops_before = 0
        self._resumed: Iterator[UserBatch] | None = None
        """The batches of the pass in the middle of which the loop began."""
        object.__setattr__(iterator, "_enumerate_iterator", self._steps)

    def group_steps(self, size: Callable[[int], int], group: Callable[[Iterator[UserBatch], int], Iterator[UserBatch]]) -> None:
        """Take several steps at a time, as with `steps_per_execution`: `size(step)` of them, but none beyond the end of the epoch.

        The steps get `group(batches, count)` in place of the iterator.
        """
        self._grouping = size, group

    def begin_at_step(
        self, step: int, batches: Iterator[UserBatch], read: int, before_step: Callable[[], None] | None = None
    ) -> None:
        """Begin the next epoch with this step and these batches; `read` batches of their pass were read before.

        `before_step` is called after `on_epoch_begin` of callbacks, and before their `on_train_batch_begin`. If no batch
        is left, the previous step comes again, with `NoStep` in place of batches: Keras ends an epoch with the logs of its last step.
        """
        self._begin = step, batches, read, before_step

    def read_loops(self, loops: int) -> None:
        """Read, when the next loop begins, what this many loops before it have read: the source is then where they left it."""
        self._loops_before = loops

    def close(self) -> None:
        """End what reads ahead for steps that do not come: the workers of a dataset would wait for them when the program ends."""
        for batches in (self._iterator._current_iterator, self._resumed):
            close = getattr(batches, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):  # of a batch that no step has asked for
                    close()

    @property
    def adapter(self) -> KerasObject:
        return self._iterator.data_adapter

    @property
    def steps(self) -> int | None:
        """Return the number of steps in an epoch; None if it is not known."""
        return self._iterator.num_batches

    @property
    def are_passes(self) -> bool:
        """Return whether each epoch is a pass over the data."""
        return self._iterator.steps_per_epoch in (None, self._iterator.data_adapter.num_batches)

    def is_pass_over(self, read: int) -> bool:
        """Return, at the end of an epoch, whether the next epoch begins another pass, if `read` batches of this pass were read."""
        iterator = self._iterator
        length = self._iterator._num_batches
        return iterator.steps_per_epoch is None or iterator._current_iterator is None or bool(length and read >= length)

    def _read_loop(self) -> None:
        """Read the batches of one loop of `evaluate`, and move the iterator back to its start, as the next `evaluate` does."""
        iterator = self._iterator
        with iterator.catch_stop_iteration():
            for begin, end, batches in self._stock():
                next(batches)
                collections.deque(itertools.islice(batches, end - begin), maxlen=0)
        current = iterator._epoch_iterator
        iterator.reset()
        iterator._epoch_iterator = current

    def _steps(self) -> Iterator[tuple[int, int, Batches]]:
        loops, self._loops_before = self._loops_before, 0
        for _ in range(loops):
            self._read_loop()
        singles: Iterator[tuple[int, int, KerasObject]] = self._singles()
        for begin, end, batches in singles:
            if self._grouping is not None and not isinstance(batches, NoStep):
                size, group = self._grouping
                steps = size(begin)
                if self._iterator.data_adapter.num_batches is None:  # the pass may end within the group
                    batches = ReadBatches(batches, min(steps, self._iterator.steps_per_epoch - begin))
                    steps = len(batches)
                while end - begin + 1 < steps and self._more_in_epoch(end + 1):
                    _, end, _ = next(singles)
                batches = group(batches, end - begin + 1)
            yield begin, end, batches

    def _singles(self) -> Iterator[tuple[int, int, Batches]]:
        if self._begin is None:
            yield from self._stock()
            return
        (first_step, batches, read, before_step), self._begin = self._begin, None
        if before_step is not None:
            before_step()
        iterator = self._iterator
        first = next(batches, None)
        if first is None:
            iterator.data_adapter.on_epoch_begin()
            yield first_step - 1, first_step - 1, NoStep()
            iterator.data_adapter.on_epoch_end()
            return
        self._resumed = batches
        batches = itertools.chain([first], batches)
        if iterator.steps_per_epoch is None:  # Keras asks for the batches of the pass

            def get_batches_once() -> Iterator[UserBatch]:
                object.__setattr__(iterator, "_get_iterator", get_iterator)
                return batches

            get_iterator = iterator._get_iterator
            object.__setattr__(iterator, "_get_iterator", get_batches_once)
        iterator._current_iterator = batches
        iterator._steps_seen = read - first_step
        yield from ((begin, end, remaining) for begin, end, remaining in self._stock() if begin >= first_step)

    def _more_in_epoch(self, step: int) -> bool:
        # One request too many, and Keras' generator would end the epoch before its last batches were read.
        iterator = self._iterator
        length = self._iterator._num_batches
        return step < (iterator.steps_per_epoch or length or 0) and not (length and iterator._steps_seen >= length)


class ReadBatches:
    """Batches that are read before a step takes them, so that their number is known. An error of the source is raised after the last of them."""

    def __init__(self, batches: Iterator[UserBatch], most: int) -> None:
        self._batches: list[UserBatch] = []
        self._error: Exception | None = None
        try:
            for batch in itertools.islice(batches, most):
                self._batches.append(batch)
        except Exception as error:  # of the source; it is raised in place of the next batch
            self._error = error
        self._length = len(self._batches) + (self._error is not None)

    def __len__(self) -> int:
        """Return how many batches there were; an error counts as one."""
        return self._length

    def __iter__(self) -> Iterator[UserBatch]:
        return self

    def __next__(self) -> UserBatch:
        if self._batches:
            return self._batches.pop(0)
        raise StopIteration if self._error is None else self._error


class NoStep:
    """A substitute for batches: nothing is left to train on in this epoch."""


def is_call_of_fit(keywords: Keywords) -> bool:
    """Return whether a call of `evaluate` with these keywords is a validation of `fit`, which keeps its iterator from epoch to epoch."""
    return bool(keywords.get("_use_cached_eval_dataset"))


def has_known_length(iterator: EpochIterator) -> bool:
    return bool(iterator.num_batches)
