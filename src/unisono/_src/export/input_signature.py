"""What an exported model takes: names, shapes and dtypes of arrays, and the structure that they come in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import export as jax_export
from keras import ops

from unisono._src import keras_private
from unisono._src.export.structure import Structure, leaves_like, put_together, taken_apart

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a model. The first axis of each array counts rows, and None stands for a length that is left open."""

    structure: Structure
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    converts: bool
    """Whether the model brings what it gets to these dtypes and ranks by itself, as functional and sequential models do."""

    def arrays(self, given: Any) -> list[Any]:
        """What is given in the model's structure, as arrays in their order, checked and brought to their dtypes."""
        found = leaves_like(self.structure, given, self.names)
        return [self._array(index, ops.convert_to_tensor(array)) for index, array in enumerate(found)]

    def nested(self, arrays: Sequence[Any]) -> Any:
        """The arrays in the structure that the model takes."""
        return put_together(self.structure, arrays)

    @property
    def specs(self) -> list[Any]:
        """What Keras' own export is told: one positional argument, with its structure."""
        described = zip(self.names, self.shapes, self.dtypes, strict=True)
        return [self.nested([keras.InputSpec(shape=shape, dtype=dtype, name=name) for name, shape, dtype in described])]

    @property
    def open_lengths(self) -> int:
        """How many lengths beside the number of rows are left open."""
        return sum(length is None for shape in self.shapes for length in shape[1:])

    def symbolic(self, shared: bool) -> list[jax.ShapeDtypeStruct]:
        """For a trace that holds for any number of rows; and for any lengths that were left open, which are the same along an axis
        of all inputs if they are `shared`."""
        scope = jax_export.SymbolicScope()

        def length(index: int, axis: int, of: int | None) -> str:
            return str(of) if of is not None else f"length_{axis}" if shared else f"length_{index}_{axis}"

        found = []
        for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            lengths = ["rows", *(length(index, axis, of) for axis, of in enumerate(shape[1:], 1))]
            found.append(jax.ShapeDtypeStruct(jax_export.symbolic_shape(",".join(lengths), scope=scope), dtype))
        return found

    def of_rows(self, rows: int, length: int) -> list[jax.ShapeDtypeStruct]:
        """For a trace with so many rows, and this length wherever one was left open."""
        shapes = [(rows, *(length if of is None else of for of in shape[1:])) for shape in self.shapes]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]

    def _array(self, index: int, array: Any) -> Any:
        name, shape, dtype = self.names[index], self.shapes[index], self.dtypes[index]
        if self.converts and array.ndim == len(shape) + 1 and array.shape[-1] == 1:
            array = ops.squeeze(array, -1)
        elif self.converts and array.ndim == len(shape) - 1 and shape[-1] == 1:
            array = ops.expand_dims(array, -1)
        if array.ndim != len(shape) or any(is_other(ours, theirs) for ours, theirs in zip(shape, array.shape, strict=True)):
            raise ValueError(f"The exported model takes {name!r} of shape {as_text(shape)}, and received {tuple(array.shape)}.")
        if not self.converts and is_float(array.dtype) != is_float(dtype):
            raise TypeError(
                f"The exported model takes {name!r} as {dtype}, as in the example that it was exported with, and received {array.dtype}. "
                f"Convert it, or export the model with an example of that dtype: un.export(model, path, inputs=x[:1])."
            )
        return ops.cast(array, dtype)


def of_model(model: Any, example: Any) -> Inputs:
    """What a built model takes.

    Args:
        model: A Keras model.
        example: Arrays of a batch, or what has their shapes and dtypes; None where the model has to know by itself.
    """
    tensors = keras_private.input_tensors(model)
    if tensors is None and example is None:
        raise ValueError(
            f"The model {model.name!r} is a subclassed one ({type(model).__name__}), which does not know the dtypes of its inputs. Write "
            f"un.export(model, path, inputs=x[:1]) with a row of data, in the structure that the model takes."
        )
    structure, leaves = taken_apart(tensors if example is None else example)
    for leaf in leaves:
        check_leaf(leaf)
    known = taken_apart(tensors)[1]
    return Inputs(
        structure,
        tuple(names_of(known if len(known) == len(leaves) else leaves)),
        tuple((None, *leaf.shape[1:]) for leaf in leaves),
        tuple(str(jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves),
        converts=tensors is not None,
    )


def names_of(leaves: Sequence[Any]) -> list[str]:
    """Those that were given; an automatic name depends on what a program has made before."""
    given = [getattr(leaf, "name", None) or "" for leaf in leaves]
    return [f"input_{i}" if re.fullmatch(r"((keras_tensor|input_layer)(_\d+)?)?", name) else name for i, name in enumerate(given)]


def check_leaf(leaf: Any) -> None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or leaf.shape is None or not len(leaf.shape):
        raise TypeError(
            f"inputs= received {leaf!r} of type {type(leaf).__name__}. Give arrays whose first axis counts rows, such as x[:1], or "
            f"keras.InputSpec(shape=(None, ...), dtype=...)."
        )
    if str(leaf.dtype) == "string" or np.dtype(str(leaf.dtype) if isinstance(leaf.dtype, str) else leaf.dtype).kind in "OSU":
        raise TypeError(
            f"The model takes texts ({leaf.dtype}), which JAX knows no arrays of. Move the layers that read texts into the data "
            f"pipeline, and export the model behind them."
        )


def is_other(ours: int | None, theirs: Any) -> bool:
    """Of lengths that are both known."""
    return ours is not None and isinstance(theirs, int) and ours != theirs


def is_float(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))


def as_text(shape: Shape) -> str:
    return str(tuple(shape)).replace("None", "rows", 1)
