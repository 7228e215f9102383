"""How a model computes, beside its variables: what its layers and compile() were configured with, as a checkpoint keeps it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from unisono._src import keras_private

DROPPED = {"name", "trainable", "dtype", "module", "registered_name", "build_config", "batch_shape", "optional"}
"""Of a configuration: what is compared elsewhere, or changes no number."""
OF_LOSS = ("loss", "loss_weights")


def of_model(model: Any) -> dict[str, Any]:
    """Return the configuration of a model's layers, in order, and of its loss and its schedule, in JSON."""
    layers = [layer for layer in keras_private.layers_of(model) if not isinstance(layer, keras.Model | keras.layers.InputLayer)]
    found: dict[str, Any] = {"layers": [[type(layer).__name__, settings(layer.get_config)] for layer in layers]}
    if getattr(model, "compiled", False):
        compiled = settings(model.get_compile_config)
        found["compile()"] = {name: compiled.get(name) for name in OF_LOSS}
        found["compile()"]["run_eagerly"] = keras_private.eager_option(model) is not None
        rate = settings(model.optimizer.get_config).get("learning_rate")
        if isinstance(rate, dict):  # a number is a variable, and so part of the state
            found["compile()"]["learning_rate"] = rate
    return found


def settings(get_config: Any) -> dict[str, Any]:
    """Return a configuration in JSON; nothing of one that cannot be had."""
    with contextlib.suppress(Exception), warnings.catch_warnings():  # of a class or a function that Keras cannot write down
        warnings.simplefilter("ignore")
        return plain(keras.saving.serialize_keras_object(get_config()) or {})
    return {}


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its code names files and lines
            return "a lambda"
        kept = {str(key): of for key, of in value.items() if key not in DROPPED and not str(key).endswith("_initializer")}
        return {key: plain(of) for key, of in kept.items()}
    if isinstance(value, list | tuple):
        return [plain(of) for of in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def differences(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is configured in another way, of a model of this name."""
    for number, ((kind, theirs), (other, ours)) in enumerate(zip(there["layers"], here["layers"], strict=False)):
        if kind != other:
            yield f"layer {number} of {name}: {kind} there, {other} here"
        else:
            yield from changed(f"layer {number} ({kind}) of {name}", theirs, ours)
    yield from changed(f"compile() of {name}", there.get("compile()", {}), here.get("compile()", {}))


def changed(of: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for setting in [key for key in there if key in here and there[key] != here[key]]:
        theirs, ours = there[setting], here[setting]
        if isinstance(theirs, dict) and isinstance(ours, dict):
            yield from changed(f"{setting} of {of}", theirs, ours)
        else:
            yield f"{setting} of {of}: {said(theirs)} there, {said(ours)} here"


def said(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    kind = value.get("class_name", value)
    return str(value["config"] if kind == "function" else kind)


def warn_of_others(where: Any, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Of a run that goes on with a model that computes something else."""
    found = [of for name in there.keys() & here.keys() for of in differences(name, there[name], here[name])]
    if found:
        warnings.warn(
            f"The checkpoint {where} is of a program with another configuration, and training goes on with that of this program: "
            f"{'; '.join(found)}. That is another run.",
            stacklevel=6,
        )
