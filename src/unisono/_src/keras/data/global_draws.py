"""A warning of draws from generators of the whole process. No checkpoint holds their state."""

from __future__ import annotations

import random
import warnings
from collections.abc import Hashable, Iterator
from typing import TypeVar

import numpy as np

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
