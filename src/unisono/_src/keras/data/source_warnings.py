"""Warnings of sources: rows whose order other code changes, workers that are forked, batches smaller than the replicas."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from unisono._src.engine.global_batch import Position
from unisono._src.keras.private.data_adapters import DataAdapter, find_torch_loader

T = TypeVar("T")


def warn_of_draws(batches: Iterator[T]) -> Iterator[T]:
    """Yield the same batches, and warn of global draws.

    It warns when a source draws from a global generator as it makes a batch.
    """
    while True:
        before = read_states()
        try:
            batch = next(batches)
        except StopIteration:
            return
        if read_states() != before:
            warnings.warn(
                "The dataset draws from a global generator, np.random or random, as it makes a batch. A training that is resumed draws other "
                "numbers: no checkpoint holds the state of these generators. Draw from one that the number of the batch seeds, in __getitem__: "
                "np.random.default_rng((seed, index)).",
                stacklevel=2,
            )
            yield batch
            yield from batches
            return
        yield batch


def read_states() -> Hashable:
    """Read the states of NumPy's and Python's global generators."""
    kind, words, *rest = np.random.get_state()
    return kind, np.asarray(words).tobytes(), *rest, random.getstate()


def warn_of_forks(adapter: DataAdapter) -> None:
    """Warn of forked workers. They may deadlock while JAX runs threads."""
    loader = find_torch_loader(adapter)
    if loader is None or not loader.num_workers:
        return
    context = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "fork":
        warnings.warn(
            f"The DataLoader forks this process for its {loader.num_workers} workers, while JAX runs threads in it: a worker may wait for ever for "
            f"what a thread held. Write DataLoader(..., multiprocessing_context='forkserver').",
            stacklevel=2,
        )


def warn_of_global_draws(adapter: DataAdapter) -> None:
    """Warn of an order of rows that torch's global generator decides.

    The training is to be resumed, and might then read other rows.
    """
    loader = find_torch_loader(adapter)
    samplers = [] if loader is None else [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    if any(getattr(sampler, "generator", loader) is None for sampler in samplers):
        warnings.warn(
            "The DataLoader shuffles by torch's global generator, from which other code draws too, as each pass over a DataLoader of validation "
            "data. After an interruption its rows may come in another order. Write DataLoader(..., generator=torch.Generator().manual_seed(0)).",
            stacklevel=2,
        )


class SmallBatches:
    """A check of each batch, which warns once of small ones.

    It warns when two in a row are too small: one alone may be the last of a pass.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._small: Position | None = None
        """The position of the last batch, if that was too small."""
        self._warned = False

    def note(self, rows: int, position: Position | None, sizes: Sequence[int] | None) -> None:
        """Note a batch. `sizes` is given if each replica has brought its own rows."""
        before, self._small = self._small, None
        if rows >= self._replicas or position is None or sizes is not None:
            return
        self._small = position
        if not self._warned and before == (position[0], position[1] - 1):
            self._warned = True
            warnings.warn(
                f"Batches of {rows} rows for {self._replicas} replicas: replicas without rows have nothing to do. Batches are global ones "
                f"here: if these are meant for one replica, make them {self._replicas} times as large.",
                stacklevel=4,
            )
