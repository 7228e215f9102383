"""The format "onnx", written by Keras, for programs that run ONNX files."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax.numpy
import keras

from unisono._src.export import extras
from unisono._src.export.loaded_model import find_export_inputs
from unisono._src.keras_private.export_inputs import write_back_state
from unisono._src.typing import UserBatch


def check_jax2onnx() -> None:
    extras.check_installed("jax2onnx", "onnx", 'format="onnx"')


def write_onnx(model: keras.Model, path: Path, example: UserBatch | None) -> None:
    taken = find_export_inputs(model, example)
    write_back_state(model)
    with restore_names(jax.numpy):  # jax2onnx leaves its own `cumsum` there
        model.export(str(path), format="onnx", verbose=False, input_signature=taken.keras_signature)


@contextlib.contextmanager
def restore_names(module: types.ModuleType) -> Iterator[None]:
    """Restore the values of the module's names after the block."""
    before = dict(vars(module))
    try:
        yield
    finally:
        for name, value in before.items():
            if vars(module).get(name) is not value:
                setattr(module, name, value)


def refuse_onnx(path: Path) -> NoReturn:
    raise ValueError(
        f"{path} is an ONNX file, which JAX does not run. Run it by onnxruntime.InferenceSession({str(path)!r}), or export the model with "
        f'format="stablehlo", which un.load_exported reads.'
    )
