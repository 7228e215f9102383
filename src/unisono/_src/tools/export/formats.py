"""`un.export` and `un.load_exported`, which choose the format."""

from __future__ import annotations

import importlib.util
import os

import keras

from unisono._src.keras.private.export_inputs import list_lost_variables
from unisono._src.keras.private.models import is_built
from unisono._src.local_paths import as_local_path
from unisono._src.near_names import says_near_names
from unisono._src.tools.export import keras_formats, stablehlo, write_place
from unisono._src.tools.export.saved_model import SavedModel
from unisono._src.typing import UserBatch

FORMATS = {
    "stablehlo": stablehlo.write_stablehlo,
    "saved_model": keras_formats.write_saved_model,
    "onnx": keras_formats.write_onnx,
}
"""The function that writes each format."""

NEEDED = {"saved_model": ("tensorflow", "tf", "A SavedModel"), "onnx": ("jax2onnx", "onnx", 'format="onnx"')}
"""The modules that formats need and that Unisono does not install, with the extra that installs them."""


@says_near_names
def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    format: str = "stablehlo",
    overwrite: bool = False,
    inputs: UserBatch | None = None,
) -> str:
    """Write a model to files that run without its code.

    `un.load_exported` reads them, or other programs. The files hold the forward pass and the weights, and nothing of devices or of a
    strategy.

    Args:
        model: A built model, made in a scope or outside. A callback of fit may export too.
        path: The directory to write, or for ONNX the file.
        format: "stablehlo"; "saved_model" (needs `unisono[tf]`); "onnx" (needs `unisono[onnx]`).
        overwrite: Whether an export at this path is replaced, as soon as the new one is complete.
        inputs: An example of the inputs, with a row or more. Subclassed models need it, since they do not know the dtypes of their
            inputs; for other models it fixes lengths that they leave open.

    Returns:
        The path.

    Example:
        >>> import numpy as np, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> path = export(model, tempfile.mkdtemp() + "/model")
        >>> load_exported(path)(np.ones((3, 2))).shape
        (3, 1)
    """
    kind = "saved_model" if format == "tf_saved_model" else format  # as Keras calls it
    if kind not in FORMATS:
        raise ValueError(f"un.export received format={format!r}. Write one of {', '.join(map(repr, FORMATS))}.")
    check_exportable(model)
    place = as_local_path("un.export", path).absolute()
    if kind == "onnx" and place.suffix != ".onnx":
        raise ValueError(f"un.export received the path {str(path)!r} for an ONNX file. Write {str(path) + '.onnx'!r}.")
    write_place.check_overwrite(place, overwrite)
    check_installed(kind)
    write_place.write_atomically(place, overwrite, lambda temporary: FORMATS[kind](model, temporary, inputs))
    return str(path)


@says_near_names
def load_exported(path: str | os.PathLike[str]) -> keras.Model:
    """Load a model that `un.export` wrote: to call, compose or compile.

    It may be loaded in a strategy's scope or outside, and used as a layer.

    A StableHLO export is evaluated and trained; a SavedModel, also of plain Keras, is evaluated by TensorFlow.

    Args:
        path: The path that `un.export` was given.

    Returns:
        The model, which is a layer as well.
    """
    place = as_local_path("un.load_exported", path).absolute()
    if not place.exists():
        raise FileNotFoundError(f"There is no export at {place}.")
    if write_place.is_stablehlo(place):
        return stablehlo.read_stablehlo(place)
    if write_place.is_saved_model(place):
        check_installed("saved_model")
        return SavedModel(place)
    if place.suffix == ".onnx":
        raise ValueError(
            f"{place} is an ONNX file, which JAX does not run. Run it by onnxruntime.InferenceSession({str(place)!r}), or export the model "
            f'with format="stablehlo", which un.load_exported reads.'
        )
    other = (
        f"Write keras.models.load_model({str(path)!r})."
        if place.suffix in (".keras", ".h5")
        else "Write what un.export was given."
    )
    raise ValueError(f"{place} is no export: it is neither StableHLO of un.export nor a SavedModel. {other}")


def check_exportable(model: object) -> None:
    """Refuse what is no model, or has variables without values."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"un.export received {model!r} of type {type(model).__name__}. It exports a keras.Model; write keras.Sequential([layer]) for a "
            f"layer."
        )
    if not is_built(model):
        raise ValueError(
            f"The model {model.name!r} is not built, so that it has no weights yet. Call it on one batch, or make it with keras.Input(shape), "
            f"before un.export."
        )
    lost = list_lost_variables(model)
    if lost:
        raise ValueError(
            f"The model {model.name!r} has no values of {len(lost)} variables ({lost[0].path!r} among them) now: it is part of a model that fit "
            f"is training, which holds them. Export that model, or write fitted.jax_state_sync() before un.export."
        )


def check_installed(kind: str) -> None:
    """Refuse a format whose module is missing, and say what to install."""
    if kind in NEEDED:
        module, extra, what = NEEDED[kind]
        if importlib.util.find_spec(module) is None:
            raise ImportError(f'{what} needs {module}, which is not installed. Write: pip install "unisono[{extra}]"')
