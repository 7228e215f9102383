"""The format "saved_model", written by Keras and evaluated through TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from unisono._src import keras_private
from unisono._src.export import extras
from unisono._src.export.input_signature import Inputs
from unisono._src.export.loaded_model import inputs_of
from unisono._src.export.structure import put_together, taken_apart

ENDPOINT = "serve"
"""What Keras calls the forward pass in a SavedModel."""


def check() -> None:
    extras.check("tensorflow", "tf", "A SavedModel")


def write(model: Any, path: Path, example: Any) -> None:
    taken = inputs_of(model, example)
    keras_private.settle(model)
    with warnings.catch_warnings():
        # Keras 3.15.1 tells jax2tf what is the default there, which JAX 0.10.2 warns of.
        warnings.filterwarnings(
            "ignore", message="The `native_serialization` parameter is deprecated", category=DeprecationWarning
        )
        model.export(str(path), format="tf_saved_model", verbose=False, input_signature=taken.specs)


class SavedModel(keras.Model):
    """A SavedModel that evaluates and predicts by calling TensorFlow, on the CPU or where TensorFlow computes.

    It has no variables and no gradient. Frozen (`trainable = False`) it can be the beginning of a model that is trained behind it.

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
        keras_private.set_on(self, "_restored", restored)  # no layer, and nothing to track
        keras_private.set_on(self, "_known", {})
        self._path = path
        self._inputs = signature_of(restored.serve)
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training and self.trainable:
            raise ValueError(
                f"{self.name!r} was loaded from the SavedModel {self._path}, which is evaluated by TensorFlow and has no gradients for JAX: "
                f'it cannot be trained. Export the model with format="stablehlo" to train it after loading, or write '
                f"layer.trainable = False to train only what stands behind it."
            )
        arrays = self._inputs.arrays(inputs)
        structure, like = self._results_of([(tuple(array.shape), array.dtype) for array in arrays])
        return put_together(structure, jax.pure_callback(self._served, like, *arrays))

    def compute_output_spec(self, inputs: Any, training: bool = False) -> Any:
        """Lengths that change with the number of rows stay open."""
        tensors = self._inputs.nested(list(self._inputs.names)), keras.tree.flatten(inputs)
        found = []
        for rows in (2, 3):
            shapes = [tuple(rows if of is None else of for of in tensor.shape) for tensor in tensors[1]]
            structure, like = self._results_of([(s, np.dtype(t.dtype)) for s, t in zip(shapes, tensors[1], strict=True)])
            found.append(like)
        specs = [
            keras.KerasTensor([a if a == b else None for a, b in zip(two.shape, three.shape, strict=True)], str(two.dtype))
            for two, three in zip(*found, strict=True)
        ]
        return put_together(structure, specs)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(
            f"{self.name!r} is a view of the SavedModel {self._path} and is not saved again. Copy that directory, or export the original "
            f'model with format="stablehlo".'
        )

    def _results_of(self, shapes: Sequence[tuple[Any, Any]]) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """(structure, shapes and dtypes) of the results for inputs of such shapes and dtypes: found by one call with zeros."""
        key = tuple(shapes)
        if key not in self._known:
            structure, arrays = taken_apart(self._answer([np.zeros(shape, dtype) for shape, dtype in shapes]))
            self._known[key] = structure, [jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays]
        return self._known[key]

    def _served(self, *arrays: Any) -> list[np.ndarray]:
        """Called by the compiled program, with arrays of the host."""
        results = taken_apart(self._answer([np.asarray(array) for array in arrays]))[1]
        return [a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) for a in results]

    def _answer(self, arrays: Sequence[np.ndarray]) -> Any:
        cast = [array.astype(dtype) for array, dtype in zip(arrays, self._inputs.dtypes, strict=True)]
        return keras.tree.map_structure(lambda tensor: tensor.numpy(), self._restored.serve(self._inputs.nested(cast)))


def signature_of(serve: Any) -> Inputs:
    """The inputs of an endpoint that Keras wrote: one positional argument with its structure."""
    positional, _ = serve.concrete_functions[0].structured_input_signature
    structure, specs = taken_apart(plain(positional[0]))
    return Inputs(
        structure,
        tuple(spec.name or f"input_{index}" for index, spec in enumerate(specs)),
        tuple((None, *spec.shape.as_list()[1:]) for spec in specs),
        tuple(spec.dtype.name for spec in specs),
        converts=True,
    )


def plain(nested: Any) -> Any:
    """Without the classes in which TensorFlow wraps lists and dicts, and without its order of keys, which changes from run to run."""
    if isinstance(nested, dict):
        return {key: plain(nested[key]) for key in sorted(nested)}
    if isinstance(nested, list | tuple):
        return [plain(value) for value in nested] if isinstance(nested, list) else tuple(plain(value) for value in nested)
    return nested
