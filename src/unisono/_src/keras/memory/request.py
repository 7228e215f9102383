"""A call of `strategy.memory`: its arguments are checked, and the model is made ready as `fit` does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from numbers import Integral

import jax
import keras

from unisono._src.keras.checks import refusals
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.fit.bond import get_bond
from unisono._src.keras.fit.model_building import build_model
from unisono._src.keras.memory.described_batch import describe_batch
from unisono._src.keras.memory.prediction import predict_memory
from unisono._src.keras.memory.report import MemoryReport
from unisono._src.keras.private.data_adapters import count_static_rows
from unisono._src.keras.private.models import is_built
from unisono._src.typing import UserBatch


def report_memory(
    strategy: ReplicaStrategy,
    model: keras.Model,
    batch_size: int,
    x: UserBatch,
    y: UserBatch,
    sample_weight: UserBatch,
    replicas: Iterable[int] | None,
) -> MemoryReport:
    """Report the memory of a training. The arguments are those of `strategy.memory`."""
    refusals.check_measured_model(model, strategy)
    refusals.check_before_first_step(model, strategy)
    choices = list_choices(strategy, model, batch_size, replicas)
    bond = get_bond(model)
    assert bond is not None  # it was made in the strategy's scope
    with strategy.acting():
        batch = describe_batch(model, batch_size, x, y, sample_weight, is_cut=max(choices) > 1)
    try:
        with build_on_host(model):
            build_model(bond, None, batch.tree())
        return predict_memory(strategy, model, batch, choices)
    except Exception as error:
        if y is None:
            error.add_note(
                "strategy.memory was given no labels, and derived them from the outputs and the loss. If they are others, write y=y[:1], with a "
                "row of data."
            )
        raise


def build_on_host(model: keras.Model) -> contextlib.AbstractContextManager[object]:
    """Let the optimizer and the metrics be built in the host's memory: the devices may be too small, which is the question.

    Nothing but zeros is made there. Weights are not: on another device, they could be drawn with other last bits.
    """
    if not is_built(model):
        return contextlib.nullcontext()
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return contextlib.nullcontext()
    return jax.default_device(host)


def list_choices(strategy: ReplicaStrategy, model: keras.Model, batch_size: int, replicas: Iterable[int] | None) -> list[int]:
    """List the numbers of replicas to report, in order.

    By default these are the strategy's own R, its half and its double. A model that fixes the rows of its inputs fixes R as well.
    """
    if not (isinstance(batch_size, Integral) and batch_size >= 1):
        raise ValueError(f"batch_size must be a whole number of 1 or more; received {batch_size!r}.")
    own = strategy.num_replicas_in_sync
    fewest = strategy.placement.fewest_replicas
    if replicas is None and count_static_rows(model) is not None:
        return [own]
    if replicas is None:
        return [count for count in (own // 2, own, 2 * own) if fewest <= count <= batch_size or count == own]
    chosen = sorted(set(replicas))
    wrong = [count for count in chosen if not fewest <= count <= batch_size]
    if wrong or not chosen:
        raise ValueError(
            f"replicas= lists numbers of replicas from {fewest} (one for each device) to {batch_size} (the rows of a batch); received "
            f"{wrong or chosen}."
        )
    return chosen
