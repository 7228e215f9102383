# keras.utils.PyDataset of Keras 3.15, and its adapter.

from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters.data_adapter import DataAdapter

class PyDataset:
    workers: int
    use_multiprocessing: bool
    max_queue_size: int
    def __init__(self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10) -> None: ...
    def __getitem__(self, index: int) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    @property
    def num_batches(self) -> int | None: ...
    def on_epoch_begin(self) -> None: ...
    def on_epoch_end(self) -> None: ...

class PyDatasetAdapter(DataAdapter):
    py_dataset: PyDataset
    class_weight: dict[int, float] | None
    shuffle: bool
    enqueuer: Any
    def __init__(self, x: PyDataset, class_weight: dict[int, float] | None = None, shuffle: bool = False) -> None: ...
