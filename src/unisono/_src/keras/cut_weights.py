"""Weights that lie cut over the devices of a strategy with `shard="frozen"`.

What is created in the scope lies cut at once, so that no device has to hold the whole model while it is loaded. Before training, weights
that are trained are made whole again, and those that are not, cut.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import jax
import keras

from unisono._src.engine.cut_arrays import SMALLEST, choose_sharding, lies_cut
from unisono._src.engine.device_mesh import DeviceMesh, get_mesh
from unisono._src.keras.ownership import OwningStrategy
from unisono._src.keras.private.trainer_state import (
    find_layout,
    group_variables,
    has_value,
    list_model_variables,
    place_value,
)

MOST_LISTED = 8
"""The most weights that a message lists."""


def cut_new_weight(variable: keras.Variable, strategy: OwningStrategy) -> None:
    """Cut a weight that was just created, if the strategy cuts weights. It may be frozen later."""
    if strategy.shard is not None and variable.trainable and has_value(variable):
        cut_weight(variable, get_mesh(strategy.placement.devices))


def cut_weight(variable: keras.Variable, mesh: DeviceMesh) -> None:
    """Cut a weight over the devices if it can be."""
    if can_be_cut(variable, mesh):
        place_value(variable, choose_sharding(variable.shape, mesh))


def can_be_cut(variable: keras.Variable, mesh: DeviceMesh) -> bool:
    """Whether a weight is large enough to be cut, and has an axis of equal parts."""
    return count_variable_bytes(variable) >= SMALLEST and choose_sharding(variable.shape, mesh) is not None


def count_variable_bytes(variable: keras.Variable) -> int:
    """Count the bytes of a variable's value. It may have none, as in a loop of Keras."""
    return math.prod(variable.shape) * jax.dtypes.canonicalize_dtype(variable.dtype).itemsize


def find_cut_places(model: keras.Model, strategy: OwningStrategy) -> frozenset[int]:
    """Find the places of weights in the state of training that lie cut if steps leave them unchanged."""
    if strategy.shard is None:
        return frozenset()
    mesh = get_mesh(strategy.placement.devices)
    groups = group_variables(model)
    first = len(groups["trainable_variables"])
    return frozenset(first + n for n, v in enumerate(groups["non_trainable_variables"]) if can_be_cut(v, mesh))


def place_weights(model: keras.Model, strategy: OwningStrategy, trains: bool) -> None:
    """Cut the weights that a model does not train. The others may lie whole.

    Training that has nothing to cut is refused: its user counts on memory that would not be saved.
    """
    if strategy.shard is None:
        return
    mesh = get_mesh(strategy.placement.devices)
    frozen = group_variables(model)["non_trainable_variables"]
    frozen_ids = set(map(id, frozen))
    for variable in list_model_variables(model):
        if id(variable) in frozen_ids and has_value(variable):
            cut_weight(variable, mesh)
        elif find_layout(variable) is not None and find_layout(variable) == choose_sharding(variable.shape, mesh):
            place_value(variable, None)
    if trains and all(map(has_value, model.weights)):  # else a loop of Keras holds them
        refuse_nothing_cut(repr(model.name), model.trainable_variables, frozen, strategy)


def refuse_nothing_cut(
    name: str, trained: Sequence[keras.Variable], frozen: Iterable[keras.Variable], strategy: OwningStrategy
) -> None:
    """Refuse a training of which no weight lies cut, with the bytes of its weights. `name` is that of a model or function.

    After a training with such weights it is a warning: what was frozen may be trained at the end.
    """
    if strategy.shard is None:
        return
    mesh = get_mesh(strategy.placement.devices)
    frozen = list(frozen)
    if any(lies_cut(variable.value, mesh) for variable in frozen):
        strategy.has_cut = True
        return
    reasons = {id(v): "it is trained" for v in trained} if mesh.size > 1 else {}
    largest = sorted([*trained, *frozen], key=count_variable_bytes, reverse=True)[:MOST_LISTED]
    rows = [f"    {v.path}: {count_variable_bytes(v):,} bytes; {reasons.get(id(v)) or explain_whole(v, mesh)}" for v in largest]
    text = (
        f"{type(strategy).__name__} received shard={strategy.shard!r}, which saves nothing here: all weights of {name} lie whole "
        f"on every device. Freeze what is not to be trained before fit (layer.trainable = False, or layer.enable_lora(rank)) and take "
        f"several devices, or leave shard out.\n" + "\n".join(rows)
    )
    if not strategy.has_cut:
        raise ValueError(text)
    warnings.warn(text, stacklevel=4)


def explain_whole(variable: keras.Variable, mesh: DeviceMesh) -> str:
    """Say why a weight that is not trained lies whole."""
    if mesh.size == 1:
        return "there is one device"
    if count_variable_bytes(variable) < SMALLEST:
        return f"fewer than {SMALLEST:,} are not cut"
    if choose_sharding(variable.shape, mesh) is None:
        return f"{mesh.size} devices divide none of the axes {tuple(variable.shape)}"
    return "it was made outside of the scope, or was not trainable then"
