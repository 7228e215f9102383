"""`un.ray.Dataset`: the rows of a `ray.data.Dataset`, read by their positions."""

from __future__ import annotations

from typing import Any, TypeAlias

import keras
import numpy as np

from unisono._src.tools.ray.installed import import_ray
from unisono._src.typing import UserBatch

Columns: TypeAlias = str | list[str]


class Dataset(keras.utils.PyDataset):
    """The batches of a `ray.data.Dataset`, the same on any number of workers. It is a source for `fit`.

    Make it before the training starts: the dataset is computed once, and its blocks stay in Ray's object store. Each worker reads the blocks of
    the batches that it needs. `ray.train.get_dataset_shard` gives each worker other rows, in an order that depends on the number of workers.

    Args:
        dataset: The ray.data.Dataset.
        x: The column of the inputs. A list of columns makes a dict.
        y: The column of the targets, or a list of columns; None without targets.
        batch_size: The rows of a global batch.

    Example:
        >>> rows = un.ray.Dataset(ds, x="image", y="label", batch_size=64)  # doctest: +SKIP
    """

    def __init__(self, dataset: Any, *, x: Columns, y: Columns | None = None, batch_size: int) -> None:
        super().__init__()
        ray = import_ray()
        columns = dataset.columns()
        missing = [name for name in [*as_list(x), *as_list(y)] if name not in columns]
        if missing:
            raise ValueError(
                f"un.ray.Dataset received the columns {missing}, which the dataset does not have. Write names of these: {columns}."
            )
        if batch_size < 1:
            raise ValueError(f"un.ray.Dataset received batch_size={batch_size}. Write the rows of a global batch, 1 or more.")
        ordered = dataset.copy(dataset)
        ordered.context.execution_options.preserve_order = True
        self._x, self._y, self._batch_size = x, y, batch_size
        self._blocks = ordered.select_columns([*as_list(x), *as_list(y)]).to_numpy_refs()
        count = ray.remote(count_rows)
        self._ends = np.cumsum(ray.get([count.remote(block) for block in self._blocks]))
        self._last: tuple[int, dict[str, np.ndarray]] = (-1, {})

    @property
    def num_batches(self) -> int:
        return -(-int(self._ends[-1]) // self._batch_size)

    def __getitem__(self, index: int) -> UserBatch:
        begin = index * self._batch_size
        end = min(begin + self._batch_size, int(self._ends[-1]))
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        parts = []
        for number in range(first, last + 1):
            start = int(self._ends[number - 1]) if number else 0
            block = self._read_block(number)
            parts.append({name: rows[max(begin - start, 0) : end - start] for name, rows in block.items()})
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        x, y = (
            rows[names] if isinstance(names, str) else {name: rows[name] for name in names or ()} for names in (self._x, self._y)
        )
        return (x,) if self._y is None else (x, y)

    def _read_block(self, number: int) -> dict[str, np.ndarray]:
        """Read a block. The last one is kept, since the next batch often begins in it."""
        known, block = self._last
        if known != number:
            block = import_ray().get(self._blocks[number])
            self._last = number, block
        return block


def as_list(names: Columns | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def count_rows(block: dict[str, np.ndarray]) -> int:
    return len(next(iter(block.values())))
