"""What a run is, beside its variables: kept with a checkpoint, and compared when another run goes on from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from unisono._src.versions import versions
from unisono._src.xla import device_kind, runtime


def of_run(strategy: Any, replicas: int | None) -> dict[str, Any]:
    """Return what the bits of a run depend on beside its program, seed and data, in JSON.

    `strategy` is None outside of every scope, and R where nothing says it.
    """
    return {
        "versions": versions(),
        "replicas": replicas,
        "deterministic": None if strategy is None else strategy.deterministic,
        "device": device_kind.kind_of(jax.local_devices()[0] if strategy is None else strategy.devices[0]),
        "single_thread": runtime.threads() < runtime.FEWEST_THREADS,
        "precision": {
            "x64": bool(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]
            "matmul": jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
        },
    }


def kind_in(record: Mapping[str, Any]) -> device_kind.Kind:
    """Return the kind of device of a checkpoint; older ones have no more than its name."""
    kind = record["device"]
    return {"device": kind} if isinstance(kind, str) else kind


def check_replicas(where: Any, theirs: Mapping[str, Any], ours: Mapping[str, Any], allowed: bool) -> None:
    """Of a run that goes on; outside of every scope a checkpoint is for evaluation and export, with any number."""
    there, here = theirs["replicas"], ours["replicas"]
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


def check_optimizers(where: Any, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in theirs.keys() & ours.keys():
        there, here = theirs[name], ours[name]
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


def warn_of_others(
    where: Any, theirs: Mapping[str, Any], ours: Mapping[str, Any], there: Mapping[str, list[str]], here: Mapping[str, list[str]]
) -> None:
    """What may change bits, or does. The last two are the precisions of layers."""
    said = [
        f"precision of a layer of {name}: {a} there, {b} here"
        for name in there.keys() & here.keys()
        for a, b in list(dict.fromkeys(zip(there[name], here[name], strict=False)))
        if a != b
    ]
    for name, version_here in ours["versions"].items():
        if theirs["versions"][name] != version_here:
            said.append(f"{name} {theirs['versions'][name]} there, {version_here} here")
    said += device_kind.differences(kind_in(theirs), ours["device"])
    for name, words in (("single_thread", "a single CPU thread"), ("deterministic", "deterministic")):
        if theirs[name] != ours[name] and None not in (theirs[name], ours[name]):
            said.append(f"{words}: {theirs[name]} there, {ours[name]} here")
    for name, value in theirs["precision"].items():
        if value != ours["precision"][name]:
            said.append(f"precision ({name}): {value} there, {ours['precision'][name]} here")
    if said:
        warnings.warn(
            f"The checkpoint {where} is of another setting, with which results may differ: {'; '.join(said)}.", stacklevel=5
        )
