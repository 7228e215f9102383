"""The description of a run, of its models and of its optimizers: kept in a checkpoint, and compared when another run goes on from there."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import jax
import keras

from unisono._src.keras_private.models import find_eager_option, list_layers
from unisono._src.typed_jax import settings
from unisono._src.versions import list_versions
from unisono._src.xla import device_kind, runtime

if TYPE_CHECKING:
    from unisono._src.ownership import OwningStrategy
    from unisono._src.typing import Json


DROPPED = {"name", "trainable", "dtype", "module", "registered_name", "build_config", "batch_shape", "optional"}
"""Keys of a configuration that are compared elsewhere, or change no number."""

LOSS_SETTINGS = ("loss", "loss_weights")


def describe_run(strategy: OwningStrategy | None, replicas: int | None) -> dict[str, Json]:
    """Return what the bits of a run depend on beside its program, seed and data, in JSON.

    The strategy is None outside every scope; R is None where neither strategy nor data have it.
    """
    return {
        "versions": list_versions(),
        "replicas": replicas,
        "deterministic": None if strategy is None else strategy.deterministic,
        "device": device_kind.describe_device(jax.local_devices()[0] if strategy is None else strategy.devices[0]),
        "single_thread": runtime.count_threads() < runtime.FEWEST_THREADS,
        "precision": {
            "x64": bool(settings.jax_enable_x64),
            "matmul": settings.jax_default_matmul_precision,
        },
    }


def read_device_kind(record: Mapping[str, Json]) -> device_kind.DeviceKind:
    """Return the kind of device in a record; older records have only its name."""
    kind = record["device"]
    return {"device": kind} if isinstance(kind, str) else kind


def describe_model(model: keras.Model) -> dict[str, Json]:
    """Return the configuration of a model's layers, in order, and of its loss and its learning rate schedule."""
    layers = [layer for layer in list_layers(model) if not isinstance(layer, keras.Model | keras.layers.InputLayer)]
    described: dict[str, Json] = {"layers": [[type(layer).__name__, read_settings(layer.get_config)] for layer in layers]}
    if model.compiled:
        compiled = read_settings(model.get_compile_config)
        described["compile()"] = {name: compiled.get(name) for name in LOSS_SETTINGS}
        described["compile()"]["run_eagerly"] = find_eager_option(model) is not None
        rate = read_settings(model.optimizer.get_config).get("learning_rate")
        if isinstance(rate, dict):  # a number is a variable, and so part of the state
            described["compile()"]["learning_rate"] = rate
    return described


def describe_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Json]:
    """Return the class and the settings of an optimizer."""
    settings = simplify_settings(optimizer.get_config(), {"name", "registered_name", "learning_rate"}, str)
    return {"class": type(optimizer).__name__, "settings": settings}


def read_settings(get_config: Callable[[], object]) -> dict[str, Json]:
    """Return a configuration; an empty one where Keras cannot tell it."""

    def show(value: object) -> Json:
        is_list = isinstance(value, list | tuple)
        return [simplify_settings(inner, DROPPED, show) for inner in value] if is_list else type(value).__name__

    with contextlib.suppress(Exception), warnings.catch_warnings():  # Keras cannot write down every class and function
        warnings.simplefilter("ignore")
        return simplify_settings(keras.saving.serialize_keras_object(get_config()) or {}, DROPPED, show)
    return {}


def simplify_settings(value: object, dropped: Collection[str], show: Callable[[object], Json]) -> Json:
    """Return settings without the keys that are dropped. `show` stands in for what is no number, no text and no dict."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its code contains names of files and numbers of lines
            return "a lambda"
        kept = {str(key): inner for key, inner in value.items() if key not in dropped and not str(key).endswith("_initializer")}
        return {key: simplify_settings(inner, dropped, show) for key, inner in kept.items()}
    return value if isinstance(value, bool | int | float | str | None) else show(value)
