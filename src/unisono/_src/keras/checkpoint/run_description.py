"""The description of a run, of its models and optimizers.

It is kept in a checkpoint, and compared when another run goes on from there. What does not fit is refused, the rest is warned of.
Every difference is named, with both sides.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np

from unisono._src.engine.xla import device_kind, runtime
from unisono._src.keras.private.models import find_eager_option, list_layers
from unisono._src.kernels.native.library import SWITCH, load_kernels
from unisono._src.typed_jax import settings
from unisono._src.versions import list_versions

if TYPE_CHECKING:
    from unisono._src.keras.ownership import OwningStrategy
    from unisono._src.typing import Json

MOST_LINES = 20

DROPPED = {"name", "trainable", "dtype", "module", "registered_name", "build_config", "batch_shape", "optional"}
"""Keys of a configuration that are compared elsewhere, or change no number."""

LOSS_SETTINGS = ("loss", "loss_weights")


def describe_run(strategy: OwningStrategy | None, replicas: int | None) -> dict[str, Json]:
    """Describe in JSON what a run's bits depend on.

    Its program, seed and data are left out. The strategy is None outside every scope; R is None where neither strategy nor data
    have it.
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
    """Read the kind of device in a record. Older records have only its name."""
    kind = record["device"]
    return {"device": kind} if isinstance(kind, str) else kind


def describe_model(model: keras.Model) -> dict[str, Json]:
    """Describe a model's layers, loss and learning rate schedule. The layers are in order."""
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
    """Describe an optimizer by its class and settings."""
    settings = simplify_settings(optimizer.get_config(), {"name", "registered_name", "learning_rate"}, str)
    return {"class": type(optimizer).__name__, "settings": settings}


def read_settings(get_config: Callable[[], object]) -> dict[str, Json]:
    """Read a configuration as JSON. It is empty if Keras cannot serialize it."""

    def show(value: object) -> Json:
        is_list = isinstance(value, list | tuple)
        return [simplify_settings(inner, DROPPED, show) for inner in value] if is_list else type(value).__name__

    with contextlib.suppress(Exception), warnings.catch_warnings():  # Keras cannot write down every class and function
        warnings.simplefilter("ignore")
        return simplify_settings(keras.saving.serialize_keras_object(get_config()) or {}, DROPPED, show)
    return {}


def simplify_settings(value: object, dropped: Collection[str], show: Callable[[object], Json]) -> Json:
    """Simplify settings, without the keys in `dropped`. `show` stands in for what is no number, no text and no dict."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its code contains names of files and numbers of lines
            return "a lambda"
        kept = {str(key): inner for key, inner in value.items() if key not in dropped and not str(key).endswith("_initializer")}
        return {key: simplify_settings(inner, dropped, show) for key, inner in kept.items()}
    return value if isinstance(value, bool | int | float | str | None) else show(value)


def check_objects(where: str, theirs: Collection[str], ours: Collection[str], partial: bool) -> None:
    """Refuse a checkpoint that lacks an object. One with more objects is refused too, unless it may be restored in part."""
    missing = sorted(set(ours) - set(theirs))
    left = sorted(set(theirs) - set(ours))
    if missing:
        raise ValueError(
            f"The checkpoint {where} holds no {' and no '.join(missing)}, only {', '.join(sorted(theirs))}. Nothing was restored."
        )
    if left and not partial:
        argument = f"{left[0]}=" if left[0].isidentifier() else left[0]  # an item of a list has no argument of its own
        raise ValueError(
            f"The checkpoint {where} also holds {', '.join(left)}. Give {argument} to Checkpoint as well, or write restore(path, partial=True) "
            f"to leave it, where this is not trained on. Nothing was restored."
        )


def check_same_replicas(where: str, there: int | None, here: int | None, allowed: bool) -> None:
    """Refuse another number of replicas.

    Outside every scope any number is allowed: there a checkpoint is evaluated or exported.
    """
    if here is None or there == here or allowed:
        return
    if there is None:
        raise ValueError(
            f"The checkpoint {where} was saved outside of every strategy's scope, and this model is trained with R = {here}: that is another "
            f"run. Write allow_other_replicas=True if you mean it."
        )
    raise ValueError(
        f"The checkpoint {where} is of a run with R = {there} replicas, and this strategy has R = {here}: that is another run, with other "
        f"bits. Write replicas={there}, which runs on any number of devices up to {there}, or allow_other_replicas=True if you mean it."
    )


def check_same_kernels(where: str, theirs: device_kind.DeviceKind, ours: device_kind.DeviceKind) -> None:
    """Refuse native kernels after a run without them, and the reverse. It is refused only if a switch can change it."""
    there, here = device_kind.has_native_kernels(theirs), device_kind.has_native_kernels(ours)
    if there is False and here:
        what = f"without native kernels, and this process computes with them ({ours['kernels']})"
        advice = f"Start Python with {SWITCH}=0 to go on without them."
    elif there and here is False and load_kernels().is_switched_off:
        what = f"with native kernels ({theirs['kernels']}), and {SWITCH}=0 switches them off here"
        advice = f"Start Python without {SWITCH}."
    else:
        return
    raise ValueError(
        f"The checkpoint {where} is of a run {what}: that is another run, with other bits. {advice} Nothing was restored."
    )


def check_same_optimizers(where: str, theirs: Mapping[str, Json], ours: Mapping[str, keras.optimizers.Optimizer]) -> None:
    """Refuse an optimizer of another class."""
    for name, optimizer in ours.items():
        here = type(optimizer).__name__
        there = theirs[name]["class"] if name in theirs else here
        if there != here:
            raise ValueError(
                f"The checkpoint {where} holds the state of {there} as {name}, and here that is {here}. Use {there}, or load the weights "
                f"alone, from a .weights.h5 file. Nothing was restored."
            )


def check_same_arrays(where: str, theirs: Mapping[str, np.ndarray], ours: Mapping[str, keras.Variable]) -> None:
    """Refuse arrays of other names, shapes or dtypes than the variables."""
    there, here = ({name: f"{tuple(array.shape)} {array.dtype}" for name, array in side.items()} for side in (theirs, ours))
    lines = [
        f"  {name}: {there.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')} here"
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name)
    ]
    if lines:
        more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise ValueError(
            "\n".join([f"The checkpoint {where} does not fit:", *lines[:MOST_LINES], *more, "Nothing was restored."])
        )


def describe_differences(where: str, theirs: Mapping[str, Json], ours: Mapping[str, Json]) -> Iterator[str]:
    """Yield warnings of other differences that may change bits."""
    for _, there, here in pair_values(theirs["optimizers"], ours["optimizers"]):
        if differing := list(list_differences("", there["settings"], here["settings"])):
            yield f"The {there['class']} of the checkpoint {where} has other settings: {', '.join(differing)}. That is another run."
    if differing := list(compare_circumstances(theirs, ours)):
        yield f"The checkpoint {where} is of another setting, with which results may differ: {'; '.join(differing)}."
    models = pair_values(theirs.get("configuration", {}), ours["configuration"])
    if differing := [words for model in models for words in compare_models(*model)]:
        yield (
            f"The checkpoint {where} is of a program with another configuration, and training goes on with that of this program: "
            f"{'; '.join(differing)}. That is another run."
        )


def compare_circumstances(theirs: Mapping[str, Json], ours: Mapping[str, Json]) -> Iterator[str]:
    """Yield the differences of what surrounds a program."""
    for name, there, here in pair_values(theirs["policies"], ours["policies"]):
        for pair in dict.fromkeys(zip(there, here, strict=False)):
            yield from list_differences(f"precision of a layer of {name}", *pair)
    yield from list_differences("", theirs["versions"], ours["versions"])
    yield from device_kind.list_kind_differences(read_device_kind(theirs), ours["device"])
    for name in ("single_thread", "deterministic"):
        if None not in (theirs[name], ours[name]):
            yield from list_differences(name.replace("_", " "), theirs[name], ours[name])
    yield from list_differences("precision", theirs["precision"], ours["precision"])


def compare_models(name: str, there: Mapping[str, Json], here: Mapping[str, Json]) -> Iterator[str]:
    """Yield the differences of layers and of `compile` arguments. The models have the same weights."""
    for number, ((their_class, theirs), (our_class, ours)) in enumerate(zip(there["layers"], here["layers"], strict=False)):
        layer = f"layer {number}" if their_class != our_class else f"layer {number} ({their_class})"
        pair = (theirs, ours) if their_class == our_class else (their_class, our_class)
        yield from list_differences(f"{layer} of {name}", *pair)
    yield from list_differences(f"compile() of {name}", there.get("compile()", {}), here.get("compile()", {}))


def list_differences(owner: str, there: Json, here: Json) -> Iterator[str]:
    """Yield where two values differ, at any depth. Of dicts, the keys that both have are compared."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name, theirs, ours in pair_values(there, here):
            yield from list_differences(f"{name} of {owner}" if owner else name, theirs, ours)
    elif there != here:
        yield f"{owner}: {show_setting(there)} there, {show_setting(here)} here"


def show_setting(value: Json) -> str:
    if not isinstance(value, dict):
        return str(value)
    class_name = value.get("class_name", value)
    return str(value["config"] if class_name == "function" else class_name)


def pair_values(there: Mapping[str, Json], here: Mapping[str, Json]) -> list[tuple[str, Json, Json]]:
    """Pair the values of names that both sides have. Each item is (name, there, here)."""
    return [(name, value, here[name]) for name, value in there.items() if name in here]
