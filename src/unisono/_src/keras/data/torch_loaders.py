"""Warnings of torch DataLoaders. They are about forked workers, and about an order of rows that other code changes."""

from __future__ import annotations

import multiprocessing
import warnings

from unisono._src.keras.private.data_adapters import DataAdapter, find_torch_loader


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
