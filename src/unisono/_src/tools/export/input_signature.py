"""The inputs of an exported model. Names, shapes and dtypes of arrays, and their structure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import keras
import numpy as np
from jax import export as jax_export
from keras import ops

from unisono._src.keras.private.export_inputs import find_input_tensors
from unisono._src.tools.export.structure import Structure, build_tree, flatten_tree, match_leaves
from unisono._src.typing import KerasObject, PyTree, UserBatch

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@runtime_checkable
class ArraySpec(Protocol):
    """An array, or another thing with a shape and a dtype. Symbolic tensors have both."""

    @property
    def shape(self) -> Sequence[int | None]: ...

    @property
    def dtype(self) -> DTypeLike: ...


@dataclasses.dataclass(frozen=True)
class InputSignature:
    """The inputs of a model. The first axis of each array counts rows; None stands for an open length."""

    structure: Structure
    names: Sequence[str]
    shapes: Sequence[Sequence[int | None]]
    dtypes: Sequence[str]
    converts: bool
    """Whether the model converts its inputs to these dtypes and ranks by itself. Functional and sequential models do."""

    def arrays(self, given: UserBatch) -> list[KerasObject]:
        """List the arrays of a batch in order, checked and converted. They get the dtypes of the inputs."""
        leaves = match_leaves(self.structure, given, self.names)
        return [self._convert_array(index, ops.convert_to_tensor(array)) for index, array in enumerate(leaves)]

    def nest(self, arrays: Sequence[object]) -> PyTree:
        """Nest the arrays in the structure that the model takes."""
        return build_tree(self.structure, arrays)

    @property
    def keras_signature(self) -> list[PyTree]:
        """The signature for Keras' own export. It has one positional argument, with its structure."""
        described = zip(self.names, self.shapes, self.dtypes, strict=True)
        return [self.nest([keras.InputSpec(shape=shape, dtype=dtype, name=name) for name, shape, dtype in described])]

    @property
    def open_lengths(self) -> int:
        """The number of open lengths, beside the number of rows."""
        return sum(length is None for shape in self.shapes for length in shape[1:])

    def make_open_specs(self, shared: bool) -> list[jax.ShapeDtypeStruct]:
        """Make shapes and dtypes for a trace with open lengths.

        The trace holds for any number of rows, and for any open lengths. With `shared`, open lengths along the same axis of several inputs
        are equal.
        """
        scope = jax_export.SymbolicScope()
        specs = []
        for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            name = "length" if shared else f"length_{index}"
            lengths = [f"{name}_{axis}" if length is None else str(length) for axis, length in enumerate(shape[1:], 1)]
            specs.append(jax.ShapeDtypeStruct(jax_export.symbolic_shape(",".join(["rows", *lengths]), scope=scope), dtype))
        return specs

    def of_rows(self, rows: int, length: int) -> list[jax.ShapeDtypeStruct]:
        """Make shapes and dtypes for a trace with fixed lengths.

        It has this number of rows, and `length` in place of each open length.
        """
        shapes = [(rows, *(length if known is None else known for known in shape[1:])) for shape in self.shapes]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]

    def _convert_array(self, index: int, array: KerasObject) -> KerasObject:
        """Convert one input to the program's rank and dtype. Other shapes and dtypes are refused."""
        name = self.names[index]
        shape = tuple(self.shapes[index])
        dtype = self.dtypes[index]
        if self.converts and array.ndim == len(shape) + 1 and array.shape[-1] == 1:
            array = ops.squeeze(array, -1)
        elif self.converts and array.ndim == len(shape) - 1 and shape[-1] == 1:
            array = ops.expand_dims(array, -1)
        lengths_differ = any(
            ours is not None and isinstance(theirs, int) and ours != theirs
            for ours, theirs in zip(shape, array.shape, strict=False)
        )
        if array.ndim != len(shape) or lengths_differ:
            takes = str(shape).replace("None", "rows", 1)
            raise ValueError(f"The exported model takes {name!r} of shape {takes}, and received {tuple(array.shape)}.")
        floating = jax.numpy.floating
        if not self.converts and jax.numpy.issubdtype(array.dtype, floating) != jax.numpy.issubdtype(dtype, floating):
            raise TypeError(
                f"The exported model takes {name!r} as {dtype}, as in the example that it was exported with, and received {array.dtype}. "
                f"Convert it, or export the model with an example of that dtype: un.export(model, path, inputs=x[:1])."
            )
        return ops.cast(array, dtype)


def read_inputs(model: keras.Model, example: UserBatch | None) -> InputSignature:
    """Read the inputs of a built model.

    Args:
        model: A Keras model.
        example: Arrays of a batch, or objects with their shapes and dtypes; None if the model itself tells them.
    """
    tensors = find_input_tensors(model)
    if tensors is None and example is None:
        raise ValueError(
            f"The model {model.name!r} is a subclassed one ({type(model).__name__}), which does not know the dtypes of its inputs. Write "
            f"un.export(model, path, inputs=x[:1]) with a row of data, in the structure that the model takes."
        )
    structure, leaves = flatten_tree(tensors if example is None else example)
    for leaf in leaves:
        check_leaf(leaf)
    # The names that the user gave; else new ones, since an automatic name depends on what the program made before.
    known = flatten_tree(tensors)[1]
    given = [getattr(leaf, "name", None) or "" for leaf in (known if len(known) == len(leaves) else leaves)]
    automatic = r"((keras_tensor|input_layer)(_\d+)?)?"
    return InputSignature(
        structure,
        tuple(f"input_{index}" if re.fullmatch(automatic, name) else name for index, name in enumerate(given)),
        tuple((None, *leaf.shape[1:]) for leaf in leaves),
        tuple(str(jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves),
        converts=tensors is not None,
    )


def check_leaf(leaf: object) -> None:
    """Refuse a leaf that is no array of numbers with rows. It is no array, has no axis, or holds texts."""
    if not isinstance(leaf, ArraySpec) or leaf.shape is None or not len(leaf.shape):
        raise TypeError(
            f"inputs= received {leaf!r} of type {type(leaf).__name__}. Give arrays whose first axis counts rows, such as x[:1], or "
            f"keras.InputSpec(shape=(None, ...), dtype=...)."
        )
    if str(leaf.dtype) == "string" or np.dtype(str(leaf.dtype) if isinstance(leaf.dtype, str) else leaf.dtype).kind in "OSU":
        raise TypeError(
            f"The model takes texts ({leaf.dtype}), which JAX knows no arrays of. Move the layers that read texts into the data "
            f"pipeline, and export the model behind them."
        )
