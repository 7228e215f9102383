"""The format "onnx", written by Keras, for programs that run such files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from unisono import keras_seam
from unisono.exporting import extras
from unisono.exporting.loaded import inputs_of


def check() -> None:
    extras.check("jax2onnx", "onnx", 'format="onnx"')


def write(model: Any, path: Path, example: Any) -> None:
    taken = inputs_of(model, example)
    keras_seam.settle(model)
    model.export(str(path), format="onnx", verbose=False, input_signature=taken.specs)


def refuse(path: Path) -> NoReturn:
    raise ValueError(
        f"{path} is an ONNX file, which JAX does not run. Run it by onnxruntime.InferenceSession({str(path)!r}), or export the model with "
        f'format="stablehlo", which un.load_exported reads.'
    )
