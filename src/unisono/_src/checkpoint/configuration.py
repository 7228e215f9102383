"""The configuration of a model's layers and of compile(), as a checkpoint keeps it beside the variables."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping

import keras

from unisono._src.keras_private.models import find_eager_option, list_layers
from unisono._src.typing import Json

DROPPED = {"name", "trainable", "dtype", "module", "registered_name", "build_config", "batch_shape", "optional"}
"""Keys of a configuration that are compared elsewhere, or change no number."""

LOSS_SETTINGS = ("loss", "loss_weights")


def describe_configuration(model: keras.Model) -> dict[str, Json]:
    """Return the configuration of a model's layers, in order, and of its loss and its learning rate schedule, in JSON."""
    layers = [layer for layer in list_layers(model) if not isinstance(layer, keras.Model | keras.layers.InputLayer)]
    described: dict[str, Json] = {"layers": [[type(layer).__name__, read_settings(layer.get_config)] for layer in layers]}
    if getattr(model, "compiled", False):
        compiled = read_settings(model.get_compile_config)
        described["compile()"] = {name: compiled.get(name) for name in LOSS_SETTINGS}
        described["compile()"]["run_eagerly"] = find_eager_option(model) is not None
        rate = read_settings(model.optimizer.get_config).get("learning_rate")
        if isinstance(rate, dict):  # a number is a variable, and so part of the state
            described["compile()"]["learning_rate"] = rate
    return described


def read_settings(get_config: Callable[[], object]) -> dict[str, Json]:
    """Return a configuration in JSON; an empty one where Keras cannot tell it."""
    with contextlib.suppress(Exception), warnings.catch_warnings():  # Keras cannot write down every class and function
        warnings.simplefilter("ignore")
        return simplify_setting(keras.saving.serialize_keras_object(get_config()) or {})
    return {}


def simplify_setting(value: object) -> Json:
    """Return a setting in JSON, without what is compared elsewhere or changes no number."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its code contains names of files and numbers of lines
            return "a lambda"
        kept = {str(key): inner for key, inner in value.items() if key not in DROPPED and not str(key).endswith("_initializer")}
        return {key: simplify_setting(inner) for key, inner in kept.items()}
    if isinstance(value, list | tuple):
        return [simplify_setting(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def find_differences(name: str, there: Mapping[str, Json], here: Mapping[str, Json]) -> Iterator[str]:
    """Yield, in words, each setting of this model that differs."""
    for number, ((their_class, theirs), (our_class, ours)) in enumerate(zip(there["layers"], here["layers"], strict=False)):
        if their_class != our_class:
            yield f"layer {number} of {name}: {their_class} there, {our_class} here"
        else:
            yield from compare_settings(f"layer {number} ({their_class}) of {name}", theirs, ours)
    yield from compare_settings(f"compile() of {name}", there.get("compile()", {}), here.get("compile()", {}))


def compare_settings(owner: str, there: Mapping[str, Json], here: Mapping[str, Json]) -> Iterator[str]:
    """Yield, in words, each setting of a layer or of compile() that differs."""
    for setting in [key for key in there if key in here and there[key] != here[key]]:
        theirs = there[setting]
        ours = here[setting]
        if isinstance(theirs, dict) and isinstance(ours, dict):
            yield from compare_settings(f"{setting} of {owner}", theirs, ours)
        else:
            yield f"{setting} of {owner}: {show_setting(theirs)} there, {show_setting(ours)} here"


def show_setting(value: Json) -> str:
    if not isinstance(value, dict):
        return str(value)
    class_name = value.get("class_name", value)
    return str(value["config"] if class_name == "function" else class_name)


def warn_of_other_configuration(where: str, there: Mapping[str, Json], here: Mapping[str, Json]) -> None:
    """Warn where the run goes on with a model of another configuration."""
    differing = [words for name in there.keys() & here.keys() for words in find_differences(name, there[name], here[name])]
    if differing:
        warnings.warn(
            f"The checkpoint {where} is of a program with another configuration, and training goes on with that of this program: "
            f"{'; '.join(differing)}. That is another run.",
            stacklevel=6,
        )
