"""The contenders, and the settings among which each chooses its fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Settings = dict[str, Any]
Tried = list[tuple[Settings, float | str]]
"""Settings, each with its seconds or with the reason of its failure."""


class Contender(NamedTuple):
    """One way to train.

    Args:
        command: The script, and what stands before the name of the workload.
        grid: For each setting what it may choose from.
        backend: Of Keras.
        is_peer: Whether it is somebody else's, and not the limit.
        variables: Of the environment.
    """

    command: tuple[str, ...]
    grid: Mapping[str, tuple[Any, ...]]
    backend: str = "jax"
    is_peer: bool = True
    variables: Mapping[str, str] = {}


DEFAULT = "Unisono, default"
WITHOUT = "Unisono without kernels"
BEST = "Unisono, best"
LIMIT = "JAX by hand"
KERAS = "Keras on JAX"

FORMS = tuple({"rewritten": True, "steps_per_call": steps} for steps in (1, 10))
"""Of a step by hand, in the forms and with the kernels of the engine: without, it never was faster."""


def search_settings(grid: Mapping[str, tuple[Any, ...]], measured: Callable[[Settings], float | str]) -> Tried:
    """Return the settings that were tried: one setting after another is varied, with the fastest values of those before it.

    >>> took = {(1, "a"): 3.0, (2, "a"): 2.0, (2, "b"): 2.5}
    >>> search_settings({"n": (1, 2), "kind": ("a", "b")}, lambda settings: took[tuple(settings.values())])
    [({'n': 1, 'kind': 'a'}, 3.0), ({'n': 2, 'kind': 'a'}, 2.0), ({'n': 2, 'kind': 'b'}, 2.5)]
    """
    now: Settings = {name: choices[0] for name, choices in grid.items()}
    tried = [(now, measured(now))]
    for name, choices in grid.items():
        others = [now | {name: choice} for choice in choices[1:]]
        tried += [(settings, measured(settings)) for settings in others]
        now = find_fastest(tried) or now
    return tried


def find_fastest(tried: Tried) -> Settings | None:
    """Return the fastest settings; None where all failed."""
    good = [(took, settings) for settings, took in tried if isinstance(took, float)]
    return min(good, key=lambda one: one[0])[1] if good else None


def list_contenders(cores: int, is_image: bool) -> dict[str, Contender]:
    """Return all of them; `is_image`: whether the workload has a format of data to choose.

    What never was the fastest in earlier runs is not tried: one thread for torch, XLA under TensorFlow, channels first for Keras on JAX
    and for torch DDP.
    """
    formats = {"data_format": ("channels_last", "channels_first")} if is_image else {}
    layouts, last = ({"channels_last": (True, False)}, {"channels_last": (True,)}) if is_image else ({}, {})
    compiled = {"compile": (True, False)}
    steps = {"steps_per_execution": (1, 10)}
    few = {"threads": tuple(dict.fromkeys((cores, 1)))}
    every = {"threads": (cores,)}
    return {
        DEFAULT: Contender(("by_keras.py", "ours"), {}, is_peer=False),
        WITHOUT: Contender(("by_keras.py", "ours"), {}, is_peer=False, variables={"UNISONO_NATIVE": "0"}),
        BEST: Contender(("by_keras.py", "ours"), {"strategy": list_placements(max(cores, 2))}, is_peer=False),
        KERAS: Contender(("by_keras.py", "keras-jax"), steps),
        "Keras on TensorFlow": Contender(("by_keras.py", "keras-tensorflow"), few | steps, "tensorflow"),
        "Keras on torch": Contender(("by_keras.py", "keras-torch"), every | formats, "torch"),
        "Keras DataParallel on JAX": Contender(("by_keras.py", "keras-jax-data-parallel"), {"devices": (2,)}),
        "tf.distribute": Contender(("by_keras.py", "tf-mirrored"), {"devices": (1, 2)}, "tensorflow"),
        "torch by hand": Contender(("by_torch.py",), every | compiled | layouts),
        "torch DDP": Contender(("by_torch.py",), {"processes": (2,)} | compiled | last),
        LIMIT: Contender(("by_jax.py",), {"form": FORMS}, is_peer=False),
    }


def list_placements(devices: int) -> tuple[Settings, ...]:
    """Return what is written into the brackets of `MirroredStrategy`, beside the default."""
    several = (devices, 4 * devices)
    return {"devices": 1, "replicas": 4 * devices}, *({"devices": devices, "replicas": replicas} for replicas in several)
