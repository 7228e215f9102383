"""The comparison of a checkpoint with the objects and the run that take it: what does not fit is refused, the rest is warned of.

Every difference is named, with both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import keras
import numpy as np

from unisono._src.checkpoint.run_description import read_device_kind
from unisono._src.native.library import SWITCH, load_kernels
from unisono._src.typing import Json
from unisono._src.xla.device_kind import DeviceKind, has_native_kernels, list_kind_differences

MOST_LINES = 20


def check_objects(where: str, theirs: Collection[str], ours: Collection[str], partial: bool) -> None:
    """Refuse a checkpoint that lacks an object; and one that has more objects, unless it may be restored in part."""
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
    """Refuse another number of replicas. Outside every scope any number is allowed: there a checkpoint is evaluated or exported."""
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


def check_same_kernels(where: str, theirs: DeviceKind, ours: DeviceKind) -> None:
    """Refuse to go on with native kernels after a run without them, or the other way round, where a switch can change it."""
    there = has_native_kernels(theirs)
    here = has_native_kernels(ours)
    if None in (there, here) or there == here:
        return
    if here:
        raise ValueError(
            f"The checkpoint {where} is of a run without native kernels, and this process computes with them ({ours['kernels']}): that is "
            f"another run, with other bits. Start Python with {SWITCH}=0 to go on without them. Nothing was restored."
        )
    if load_kernels().is_switched_off:
        raise ValueError(
            f"The checkpoint {where} is of a run with native kernels ({theirs['kernels']}), and {SWITCH}=0 switches them off here: that is "
            f"another run, with other bits. Start Python without {SWITCH}. Nothing was restored."
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
    """Refuse a checkpoint whose arrays have other names, shapes or dtypes than the arrays here."""
    there, here = ({name: f"{tuple(array.shape)} {array.dtype}" for name, array in side.items()} for side in (theirs, ours))
    lines = [
        f"  {name}: {their_kind} in the checkpoint, {our_kind} here"
        for name, their_kind, our_kind in pair_values(there, here)
        if their_kind != our_kind
    ]
    lines += [f"  {name}: {there[name]} in the checkpoint, nothing here" for name in there if name not in here]
    lines += [f"  {name}: nothing in the checkpoint, {here[name]} here" for name in here if name not in there]
    if lines:
        more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise ValueError(
            "\n".join([f"The checkpoint {where} does not fit:", *lines[:MOST_LINES], *more, "Nothing was restored."])
        )


def describe_differences(where: str, theirs: Mapping[str, Json], ours: Mapping[str, Json]) -> Iterator[str]:
    """Yield the warnings of everything else in which two records differ that changes bits, or may change them."""
    for _, there, here in pair_values(theirs["optimizers"], ours["optimizers"]):
        settings = here["settings"]
        differing = list_differences((f"{key} =", value, settings.get(key)) for key, value in there["settings"].items())
        if differing:
            yield f"The {there['class']} of the checkpoint {where} has other settings: {', '.join(differing)}. That is another run."
    differing = list(compare_circumstances(theirs, ours))
    if differing:
        yield f"The checkpoint {where} is of another setting, with which results may differ: {'; '.join(differing)}."
    configurations = pair_values(theirs.get("configuration", {}), ours["configuration"])
    differing = [words for name, there, here in configurations for words in compare_models(name, there, here)]
    if differing:
        yield (
            f"The checkpoint {where} is of a program with another configuration, and training goes on with that of this program: "
            f"{'; '.join(differing)}. That is another run."
        )


def compare_circumstances(theirs: Mapping[str, Json], ours: Mapping[str, Json]) -> Iterator[str]:
    for name, there, here in pair_values(theirs["policies"], ours["policies"]):
        pairs = dict.fromkeys(zip(there, here, strict=False))
        yield from list_differences((f"precision of a layer of {name}:", *pair) for pair in pairs)
    yield from list_differences((name, there, here) for name, here, there in pair_values(ours["versions"], theirs["versions"]))
    yield from list_kind_differences(read_device_kind(theirs), ours["device"])
    for name, words in (("single_thread", "a single CPU thread:"), ("deterministic", "deterministic:")):
        if None not in (theirs[name], ours[name]):
            yield from list_differences([(words, theirs[name], ours[name])])
    precisions = pair_values(theirs["precision"], ours["precision"])
    yield from list_differences((f"precision ({name}):", there, here) for name, there, here in precisions)


def compare_models(name: str, there: Mapping[str, Json], here: Mapping[str, Json]) -> Iterator[str]:
    for number, ((their_class, theirs), (our_class, ours)) in enumerate(zip(there["layers"], here["layers"], strict=False)):
        if their_class == our_class:
            yield from compare_settings(f"layer {number} ({their_class}) of {name}", theirs, ours)
        else:
            yield f"layer {number} of {name}: {their_class} there, {our_class} here"
    yield from compare_settings(f"compile() of {name}", there.get("compile()", {}), here.get("compile()", {}))


def compare_settings(owner: str, there: Mapping[str, Json], here: Mapping[str, Json]) -> Iterator[str]:
    for setting, theirs, ours in pair_values(there, here):
        if isinstance(theirs, dict) and isinstance(ours, dict):
            yield from compare_settings(f"{setting} of {owner}", theirs, ours)
        elif theirs != ours:
            yield f"{setting} of {owner}: {show_setting(theirs)} there, {show_setting(ours)} here"


def show_setting(value: Json) -> str:
    if not isinstance(value, dict):
        return str(value)
    class_name = value.get("class_name", value)
    return str(value["config"] if class_name == "function" else class_name)


def pair_values(there: Mapping[str, Json], here: Mapping[str, Json]) -> list[tuple[str, Json, Json]]:
    """Return the names that both sides have, with both values."""
    return [(name, value, here[name]) for name, value in there.items() if name in here]


def list_differences(pairs: Iterable[tuple[str, Json, Json]]) -> list[str]:
    return [f"{words} {there} there, {here} here" for words, there, here in pairs if there != here]
