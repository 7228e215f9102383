"""The model that `un.load_exported` makes of a SavedModel. TensorFlow evaluates it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import keras
import numpy as np

from unisono._src.keras.private.instances import set_untracked
from unisono._src.tools.export.input_signature import InputSignature
from unisono._src.tools.export.structure import Structure, build_tree, flatten_tree
from unisono._src.typing import AnyArray, Array, HostArray, Json, Outputs, PyTree, Shape, UserBatch

ENDPOINT = "serve"
"""The name of the forward pass in a SavedModel of Keras."""

MOST_SHAPES = 64
"""The number of input shapes whose result shapes are kept."""


class SavedModel(keras.Model):
    """A SavedModel that evaluates and predicts by calls of TensorFlow.

    It runs on the CPU or where TensorFlow computes. It has no variables and no gradient. Frozen (`trainable = False`) it can be the first
    layer of a model whose other layers train.

    Args:
        path: The directory.
        name: The model's name.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(name=name, autocast=False)
        import tensorflow

        restored = tensorflow.saved_model.load(str(path))
        if not hasattr(restored, ENDPOINT):
            raise ValueError(
                f"The SavedModel {path} has no endpoint {ENDPOINT!r}, only {sorted(restored.signatures)}: Keras did not write it by "
                f"model.export. Call it by tensorflow.saved_model.load."
            )
        set_untracked(self, "_restored", restored)  # hidden from Keras, which would track it
        set_untracked(self, "_find_results", functools.lru_cache(maxsize=MOST_SHAPES)(self._compute_results))
        self._path = path
        positional, _ = restored.serve.concrete_functions[0].structured_input_signature
        self._inputs = read_signature(positional[0])
        self.built = True

    def call(self, inputs: UserBatch, training: bool = False) -> Outputs:
        if training and self.trainable:
            raise ValueError(
                f"{self.name!r} was loaded from the SavedModel {self._path}, which is evaluated by TensorFlow and has no gradients for JAX: "
                f'it cannot be trained. Export the model with format="stablehlo" to train it after loading, or write '
                f"layer.trainable = False to train only what stands behind it."
            )
        arrays = self._inputs.arrays(inputs)
        structure, like = self._find_results(tuple((tuple(array.shape), np.dtype(array.dtype)) for array in arrays))
        return build_tree(structure, jax.pure_callback(self._serve, like, *arrays))

    def compute_output_spec(self, inputs: PyTree, training: bool = False) -> PyTree:
        """Compute the shapes and dtypes of the outputs. Lengths that change with the number of rows stay open."""
        tensors = keras.tree.flatten(inputs)

        def find_for(rows: int) -> tuple[Structure, list[jax.ShapeDtypeStruct]]:
            shapes = [tuple(rows if length is None else length for length in tensor.shape) for tensor in tensors]
            return self._find_results(
                tuple((shape, np.dtype(tensor.dtype)) for shape, tensor in zip(shapes, tensors, strict=True))
            )

        structure, of_two = find_for(2)  # a length that differs between two and three rows depends on their number
        of_three = find_for(3)[1]
        specs = [
            keras.KerasTensor([a if a == b else None for a, b in zip(two.shape, three.shape, strict=True)], str(two.dtype))
            for two, three in zip(of_two, of_three, strict=True)
        ]
        return build_tree(structure, specs)

    def get_config(self) -> dict[str, Json]:
        raise NotImplementedError(
            f"{self.name!r} is a view of the SavedModel {self._path} and is not saved again. Copy that directory, or export the original "
            f'model with format="stablehlo".'
        )

    def _compute_results(self, inputs: tuple[tuple[Shape, np.dtype], ...]) -> tuple[Structure, list[jax.ShapeDtypeStruct]]:
        """Find the structure and shapes of the results by one call. The call gets zeros of these input shapes and dtypes."""
        structure, arrays = self._call_endpoint([np.zeros(shape, dtype) for shape, dtype in inputs])
        return structure, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]

    def _serve(self, *arrays: Array) -> list[HostArray]:
        """Compute the results of the endpoint. The compiled program calls this, with arrays of the host."""
        return self._call_endpoint(arrays)[1]

    def _call_endpoint(self, arrays: Sequence[AnyArray]) -> tuple[Structure, list[HostArray]]:
        converted = [np.asarray(array).astype(dtype) for array, dtype in zip(arrays, self._inputs.dtypes, strict=True)]
        results = self._restored.serve(self._inputs.nest(converted))
        structure, host_arrays = flatten_tree(keras.tree.map_structure(lambda tensor: tensor.numpy(), results))
        return structure, [array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) for array in host_arrays]


def read_signature(argument: PyTree) -> InputSignature:
    """Read the inputs of an endpoint that Keras wrote. TensorFlow describes its one argument."""
    structure, specs = flatten_tree(unwrap_containers(argument))
    return InputSignature(
        structure,
        tuple(spec.name or f"input_{index}" for index, spec in enumerate(specs)),
        tuple((None, *spec.shape.as_list()[1:]) for spec in specs),
        tuple(spec.dtype.name for spec in specs),
        converts=True,
    )


def unwrap_containers(nested: PyTree) -> PyTree:
    """Strip TensorFlow's wrappers from lists and dicts, and sort keys. TensorFlow's order of keys changes from run to run."""
    if isinstance(nested, dict):
        return {key: unwrap_containers(nested[key]) for key in sorted(nested)}
    if isinstance(nested, list | tuple):
        values = [unwrap_containers(value) for value in nested]
        return values if isinstance(nested, list) else tuple(values)
    return nested
