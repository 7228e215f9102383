"""The format "onnx", written by Keras, for programs that run such files."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy

from unisono._src import keras_private
from unisono._src.export import extras
from unisono._src.export.loaded_model import inputs_of


def check() -> None:
    extras.check("jax2onnx", "onnx", 'format="onnx"')


def write(model: Any, path: Path, example: Any) -> None:
    taken = inputs_of(model, example)
    keras_private.settle(model)
    with as_before(jax.numpy):  # jax2onnx leaves a `cumsum` of its own there
        model.export(str(path), format="onnx", verbose=False, input_signature=taken.specs)


@contextlib.contextmanager
def as_before(module: types.ModuleType) -> Iterator[None]:
    """After the block, the module's names stand for what they stood for."""
    before = dict(vars(module))
    try:
        yield
    finally:
        for name, value in before.items():
            if vars(module).get(name) is not value:
                setattr(module, name, value)


def refuse(path: Path) -> NoReturn:
    raise ValueError(
        f"{path} is an ONNX file, which JAX does not run. Run it by onnxruntime.InferenceSession({str(path)!r}), or export the model with "
        f'format="stablehlo", which un.load_exported reads.'
    )
