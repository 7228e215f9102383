"""A global batch that is known by its shapes alone. Its arrays have no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import keras
import numpy as np

from unisono._src.engine.global_batch import NUMERIC_KINDS, GlobalBatch, as_global_batch
from unisono._src.keras.private.compiled_losses import find_class_options, get_given_loss
from unisono._src.keras.private.export_inputs import find_input_tensors
from unisono._src.keras.private.models import describe_outputs
from unisono._src.typing import HostArray, PyTree, Shape, UserBatch, UserObject

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@runtime_checkable
class ArraySpec(Protocol):
    """An array, or what describes one."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> DTypeLike: ...


def describe_batch(
    model: keras.Model, rows: int, x: UserBatch, y: UserBatch, sample_weight: UserBatch, is_cut: bool
) -> GlobalBatch:
    """Build a batch without memory.

    Args:
        model: A built model.
        rows: The rows of the batch.
        x: Arrays of any number of rows, or None: the inputs that the model knows.
        y: Labels in the same way. None: what the loss takes for the model's outputs.
        sample_weight: Weights in the same way, or None for no weights.
        is_cut: Whether several replicas share the batch.
    """
    inputs = widen("x", list_inputs(model) if x is None else x, rows)
    labels = derive_labels(model, inputs) if y is None else widen("y", y, rows)
    weights = None if sample_weight is None else widen("sample_weight", sample_weight, rows)
    return as_global_batch(keras.utils.pack_x_y_sample_weight(inputs, labels, weights), is_cut)


def list_inputs(model: keras.Model) -> PyTree:
    """List the inputs that a model knows, in its structure."""
    tensors = find_input_tensors(model)
    if tensors is None:
        raise ValueError(
            f"The model {model.name!r} is a subclassed one ({type(model).__name__}), which does not know the dtypes of its inputs. Write "
            f"strategy.memory(model, batch_size, x=x[:1]) with a row of data, in the structure that the model takes."
        )
    for tensor in jax.tree.leaves(tensors):
        if None in tensor.shape[1:]:
            raise ValueError(
                f"The input {tensor.name!r} has the shape {tuple(tensor.shape)}, whose lengths are not all known, and activations grow with "
                f"them. Write strategy.memory(model, batch_size, x=x[:1]) with a row of data of the largest length."
            )
    return tensors


def widen(name: str, given: UserBatch, rows: int) -> PyTree:
    """Describe arrays with this number of rows in place of their own."""
    return jax.tree.map(lambda leaf: widen_array(name, leaf, rows), given)


def widen_array(name: str, leaf: UserObject, rows: int) -> HostArray:
    if not isinstance(leaf, ArraySpec) or leaf.shape is None or not len(leaf.shape):
        raise TypeError(
            f"{name}= received {leaf!r} of type {type(leaf).__name__}. Give arrays whose first axis counts rows, such as {name}[:1], or "
            f"jax.ShapeDtypeStruct((1, ...), dtype)."
        )
    dtype = jax.numpy.dtype(leaf.dtype)
    if dtype.kind not in NUMERIC_KINDS:
        raise TypeError(
            f"{name}= received an array of dtype {dtype}, which no device can hold. Turn its values into numbers first, for example by a "
            f"keras.layers.StringLookup in the data pipeline."
        )
    return make_array((rows, *leaf.shape[1:]), dtype)


def make_array(shape: Shape, dtype: np.dtype | str) -> HostArray:
    """Make an array of one zero, which all its places share."""
    return np.broadcast_to(np.zeros((), jax.numpy.dtype(dtype)), shape)


def derive_labels(model: keras.Model, inputs: PyTree) -> PyTree | None:
    """Derive labels from the loss and the outputs. There are none without a loss of compile()."""
    losses = get_given_loss(model)
    if losses is None:
        return None
    outputs = describe_outputs(model, inputs)
    if not isinstance(losses, dict | list | tuple):
        return jax.tree.map(lambda output: make_labels(losses, output), outputs)
    if isinstance(outputs, dict):
        by_name = losses if isinstance(losses, dict) else dict(zip(outputs, losses, strict=True))
        return {name: make_labels(by_name.get(name), output) for name, output in outputs.items()}
    in_order = [losses.get(name) for name in model.output_names] if isinstance(losses, dict) else losses
    flat = jax.tree.leaves(outputs)
    labels = [make_labels(loss, output) for loss, output in zip(in_order, flat, strict=True)]
    return labels if isinstance(outputs, list | tuple) else labels[0]


def make_labels(loss: UserObject, output: keras.KerasTensor) -> HostArray:
    """Make the labels of one output: whole numbers for a loss that takes the number of the class, else values like the output."""
    given = keras.losses.get(loss) if isinstance(loss, str) else loss
    options = find_class_options(given)
    if options is not None or given is keras.losses.sparse_categorical_crossentropy:
        shape = list(output.shape)
        del shape[options.axis if options is not None else -1]
        return make_array(tuple(shape), "int32")
    return make_array(tuple(output.shape), keras.config.floatx())
