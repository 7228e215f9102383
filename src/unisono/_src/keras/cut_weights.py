"""Weights that lie cut over the devices of a strategy with `shard="frozen"`.

What is created in the scope lies cut at once, so that no device has to hold the whole model while it is loaded. Before training, weights
that are trained are made whole again, and those that are not, cut.
"""

from __future__ import annotations

import math

import jax
import keras

from unisono._src.engine.cut_arrays import choose_sharding, is_cut
from unisono._src.engine.device_mesh import DeviceMesh, get_mesh
from unisono._src.keras.ownership import OwningStrategy
from unisono._src.keras.private.trainer_state import (
    find_layout,
    group_variables,
    has_value,
    list_model_variables,
    place_value,
)

SMALLEST = 1 << 14
"""Weights of fewer bytes stay whole: what they take is nothing beside an activation."""

MOST_LISTED = 8
"""The most weights that a message lists."""


def cut_new_weight(variable: keras.Variable, strategy: OwningStrategy) -> None:
    """Cut a weight that was just created, if the strategy cuts weights. It may be frozen later."""
    if strategy.shard is not None and variable.trainable and has_value(variable):
        cut_weight(variable, get_mesh(strategy.placement.devices))


def cut_weight(variable: keras.Variable, mesh: DeviceMesh) -> None:
    """Cut a weight over the devices, unless it is small or no axis has equal parts."""
    if can_be_cut(variable, mesh):
        place_value(variable, choose_sharding(variable.shape, mesh))


def can_be_cut(variable: keras.Variable, mesh: DeviceMesh) -> bool:
    """Whether a weight is large enough to be cut, and has an axis of equal parts."""
    is_large = math.prod(variable.shape) * jax.dtypes.canonicalize_dtype(variable.dtype).itemsize >= SMALLEST
    return is_large and mesh.size > 1 and choose_sharding(variable.shape, mesh) is not None


def find_cut_places(model: keras.Model, strategy: OwningStrategy) -> frozenset[int]:
    """Find the places of weights in the state of training that lie cut if steps leave them unchanged."""
    if strategy.shard is None:
        return frozenset()
    mesh, groups = get_mesh(strategy.placement.devices), group_variables(model)
    first = len(groups["trainable_variables"])
    return frozenset(first + n for n, v in enumerate(groups["non_trainable_variables"]) if can_be_cut(v, mesh))


def place_weights(model: keras.Model, strategy: OwningStrategy, trains: bool) -> None:
    """Cut the weights that a model does not train. The others may lie whole.

    Training that has nothing to cut is refused: its user counts on memory that would not be saved.
    """
    if strategy.shard is None:
        return
    mesh = get_mesh(strategy.placement.devices)
    frozen = {id(variable): variable for variable in group_variables(model)["non_trainable_variables"] if has_value(variable)}
    for variable in list_model_variables(model):
        if id(variable) in frozen:
            cut_weight(variable, mesh)
        elif find_layout(variable) is not None and find_layout(variable) == choose_sharding(variable.shape, mesh):
            place_value(variable, None)
    has_values = all(map(has_value, model.weights))  # else a loop of Keras holds them
    if trains and has_values and not any(is_cut(variable.value, mesh) for variable in frozen.values()):
        raise ValueError(explain_nothing_cut(model, strategy, mesh))


def explain_nothing_cut(model: keras.Model, strategy: OwningStrategy, mesh: DeviceMesh) -> str:
    """Explain why no weight of a model lies cut, with the bytes of its weights."""
    trained = {id(variable) for variable in model.trainable_variables}
    largest = sorted(model.weights, key=lambda variable: -variable.value.nbytes)[:MOST_LISTED]
    rows = [f"    {v.path}: {v.value.nbytes:,} bytes; {explain_whole(v, id(v) in trained, mesh)}" for v in largest]
    return (
        f"{type(strategy).__name__} received shard={strategy.shard!r}, which saves nothing here: all weights of {model.name!r} lie whole "
        f"on every device. Freeze what is not to be trained before fit (layer.trainable = False, or layer.enable_lora(rank)) and take "
        f"several devices, or leave shard out.\n" + "\n".join(rows)
    )


def explain_whole(variable: keras.Variable, is_trained: bool, mesh: DeviceMesh) -> str:
    """Say why a weight lies whole."""
    if mesh.size == 1:
        return "there is one device"
    if is_trained:
        return "it is trained"
    if variable.value.nbytes < SMALLEST:
        return f"fewer than {SMALLEST:,} are not cut"
    return f"{mesh.size} devices divide none of the axes {tuple(variable.shape)}"
