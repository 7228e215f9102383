"""The formats that Keras writes. "saved_model" is for TensorFlow, "onnx" for programs that run ONNX files."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax.numpy
import keras

from unisono._src.keras.private.trainer_state import write_back_state
from unisono._src.tools.export.loaded_model import find_export_inputs
from unisono._src.typing import UserBatch


def write_saved_model(model: keras.Model, path: Path, example: UserBatch | None) -> None:
    with warnings.catch_warnings():
        # Keras 3.15.1 gives jax2tf an argument that is the default there, and JAX 0.10.2 warns of it.
        warnings.filterwarnings(
            "ignore", message="The `native_serialization` parameter is deprecated", category=DeprecationWarning
        )
        write_by_keras(model, path, example, "tf_saved_model")


def write_onnx(model: keras.Model, path: Path, example: UserBatch | None) -> None:
    names = jax.numpy.__dict__
    before = dict(names)
    try:
        write_by_keras(model, path, example, "onnx")
    finally:
        names.update(before)  # jax2onnx leaves its own `cumsum` there


def write_by_keras(model: keras.Model, path: Path, example: UserBatch | None, format: str) -> None:
    signature = find_export_inputs(model, example).keras_signature
    write_back_state(model)
    model.export(str(path), format=format, verbose=False, input_signature=signature)
