"""The description of a run beside its variables: kept in a checkpoint, and compared when another run goes on from there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import jax

from unisono._src.versions import list_versions
from unisono._src.xla import device_kind, runtime

if TYPE_CHECKING:
    from unisono._src.placement import Placement
    from unisono._src.typing import Json


class DescribedStrategy(Protocol):
    """A strategy, as checkpoints describe it."""

    @property
    def deterministic(self) -> bool: ...

    @property
    def devices(self) -> Sequence[jax.Device]: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def placement(self) -> Placement: ...


def describe_run(strategy: DescribedStrategy | None, replicas: int | None) -> dict[str, Json]:
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
            "x64": bool(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]
            "matmul": jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
        },
    }


def read_device_kind(record: Mapping[str, Json]) -> device_kind.DeviceKind:
    """Return the kind of device in a record; older records have only its name."""
    kind = record["device"]
    return {"device": kind} if isinstance(kind, str) else kind


def check_same_replicas(where: str, theirs: Mapping[str, Json], ours: Mapping[str, Json], allowed: bool) -> None:
    """Refuse another number of replicas. Outside every scope any number is allowed: there a checkpoint is evaluated or exported."""
    there = theirs["replicas"]
    here = ours["replicas"]
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


def check_same_optimizers(where: str, theirs: Mapping[str, Json], ours: Mapping[str, Json]) -> None:
    """Refuse an optimizer of another class; warn of other settings."""
    for name in theirs.keys() & ours.keys():
        there = theirs[name]
        here = ours[name]
        if there["class"] != here["class"]:
            raise ValueError(
                f"The checkpoint {where} holds the state of {there['class']} as {name}, and here that is {here['class']}. Use "
                f"{there['class']}, or load the weights alone, from a .weights.h5 file. Nothing was restored."
            )
        other = [key for key in there["settings"] if there["settings"][key] != here["settings"].get(key)]
        if other:
            pairs = ", ".join(f"{key} = {there['settings'][key]} there, {here['settings'].get(key)} here" for key in other)
            warnings.warn(
                f"The {there['class']} of the checkpoint {where} has other settings: {pairs}. That is another run.", stacklevel=5
            )


def warn_of_other_setting(
    where: str,
    theirs: Mapping[str, Json],
    ours: Mapping[str, Json],
    there: Mapping[str, list[str]],
    here: Mapping[str, list[str]],
) -> None:
    """Warn of differences that change bits or may change them. `there` and `here` are the precisions of layers."""
    differing = [
        f"precision of a layer of {name}: {their_policy} there, {our_policy} here"
        for name in there.keys() & here.keys()
        for their_policy, our_policy in list(dict.fromkeys(zip(there[name], here[name], strict=False)))
        if their_policy != our_policy
    ]
    for name, version_here in ours["versions"].items():
        if theirs["versions"][name] != version_here:
            differing.append(f"{name} {theirs['versions'][name]} there, {version_here} here")
    differing += device_kind.list_kind_differences(read_device_kind(theirs), ours["device"])
    for name, words in (("single_thread", "a single CPU thread"), ("deterministic", "deterministic")):
        if theirs[name] != ours[name] and None not in (theirs[name], ours[name]):
            differing.append(f"{words}: {theirs[name]} there, {ours[name]} here")
    for name, value in theirs["precision"].items():
        if value != ours["precision"][name]:
            differing.append(f"precision ({name}): {value} there, {ours['precision'][name]} here")
    if differing:
        warnings.warn(
            f"The checkpoint {where} is of another setting, with which results may differ: {'; '.join(differing)}.", stacklevel=5
        )
