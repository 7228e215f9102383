"""The same rows in the same batches, from every source of data that a Keras model takes: arguments for `fit`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest


class Batches(keras.utils.PyDataset):
    """Trees of arrays in batches, the last one ragged."""

    def __init__(self, rows: Any, batch_size: int = 10, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return -(-count(self.rows) // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(lambda a: a[index * self.batch_size : (index + 1) * self.batch_size], self.rows)


def arrays(rows: Any, batch_size: int) -> dict[str, Any]:
    return dict(zip(("x", "y", "sample_weight"), rows, strict=False)) | {"batch_size": batch_size}


def dataset(rows: Any, batch_size: int) -> dict[str, Any]:
    return {"x": Batches(rows, batch_size)}


def generated(rows: Any, batch_size: int = 10, times: int = 1) -> Iterator[Any]:
    of = Batches(rows, batch_size)
    for _ in range(times):
        yield from (of[index] for index in range(len(of)))


def generator(rows: Any, batch_size: int) -> dict[str, Any]:
    return {"x": generated(rows, batch_size), "steps_per_epoch": len(Batches(rows, batch_size))}


def torch_loader(rows: Any, batch_size: int) -> dict[str, Any]:
    import torch

    return {"x": torch.utils.data.DataLoader(singles(rows), batch_size)}  # pyright: ignore[reportArgumentType]


def tf_data(rows: Any, batch_size: int) -> dict[str, Any]:
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices(rows).batch(batch_size)}


def grain_map(rows: Any, batch_size: int) -> dict[str, Any]:
    import grain

    return {"x": grain.MapDataset.source(singles(rows)).batch(batch_size)}


def grain_iter(rows: Any, batch_size: int) -> dict[str, Any]:
    import grain

    return {"x": grain.MapDataset.source(singles(rows)).to_iter_dataset().batch(batch_size)}


def singles(rows: Any) -> list[Any]:
    """A list of rows."""
    return [jax.tree.map(lambda a, row=row: np.asarray(a[row]), rows) for row in range(count(rows))]


def count(rows: Any) -> int:
    return len(jax.tree.leaves(rows)[0])


PIPELINES: dict[str, Callable[[Any, int], dict[str, Any]]] = {}
"""Those that are installed."""

if importlib.util.find_spec("torch"):
    PIPELINES["torch DataLoader"] = torch_loader
if importlib.util.find_spec("tensorflow"):
    PIPELINES["tf.data"] = tf_data
if importlib.util.find_spec("grain"):
    PIPELINES |= {"grain.MapDataset": grain_map, "grain.IterDataset": grain_iter}

SOURCES = {"arrays": arrays, "PyDataset": dataset, "generator": generator, **PIPELINES}
"""By name; `(x, y)` or `(x, y, sample_weight)` and the batch size give arguments for `fit`."""


def pipelines() -> list[Any]:
    """The cases of a test over those that are installed."""
    return [pytest.param(name, marks=pytest.mark.compat) for name in PIPELINES]


class Endless(Batches):
    """The batches again and again, of unknown number."""

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        assert index < 100, "read on and on"
        return super().__getitem__(index % len(self))
