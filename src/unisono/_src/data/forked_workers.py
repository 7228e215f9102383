"""Worker processes of a torch DataLoader."""

from __future__ import annotations

import multiprocessing
import warnings

from unisono._src.keras_private.data_adapters import DataAdapter, find_torch_loader


def warn_of_forks(adapter: DataAdapter) -> None:
    """Warn that workers are forked, which may deadlock while JAX runs threads."""
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
