"""Who takes part, and with which settings each may choose its fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Settings = dict[str, Any]
Tried = list[tuple[Settings, float | str]]
"""What each settings took, or why they failed."""


class Contender(NamedTuple):
    """One way to train.

    Args:
        command: The script, and what stands before the name of the workload.
        grid: For each setting what it may choose from.
        backend: Of Keras.
        is_peer: Whether it is somebody else's, and not the limit.
    """

    command: tuple[str, ...]
    grid: Mapping[str, tuple[Any, ...]]
    backend: str = "jax"
    is_peer: bool = True


DEFAULT, BEST, LIMIT, KERAS = "Unisono, default", "Unisono, best", "JAX by hand", "Keras on JAX"

FORMS = tuple({"rewritten": rewritten, "steps_per_call": steps} for rewritten in (True, False) for steps in (1, 2, 10))
"""Of a step by hand: every one is tried, for several convolutions in a loop are fast when rewritten and slow otherwise."""


def searched(grid: Mapping[str, tuple[Any, ...]], measured: Callable[[Settings], float | str]) -> Tried:
    """From the first of everything, one setting after another: each at the fastest of those before it.

    >>> took = {(1, "a"): 3.0, (2, "a"): 2.0, (2, "b"): 2.5}
    >>> searched({"n": (1, 2), "kind": ("a", "b")}, lambda settings: took[tuple(settings.values())])
    [({'n': 1, 'kind': 'a'}, 3.0), ({'n': 2, 'kind': 'a'}, 2.0), ({'n': 2, 'kind': 'b'}, 2.5)]
    """
    now: Settings = {name: choices[0] for name, choices in grid.items()}
    tried = [(now, measured(now))]
    for name, choices in grid.items():
        others = [now | {name: choice} for choice in choices[1:]]
        tried += [(settings, measured(settings)) for settings in others]
        now = fastest(tried) or now
    return tried


def fastest(tried: Tried) -> Settings | None:
    """None where all failed."""
    good = [(took, settings) for settings, took in tried if isinstance(took, float)]
    return min(good, key=lambda one: one[0])[1] if good else None


def contenders(cores: int, is_image: bool) -> dict[str, Contender]:
    """`is_image`: whether the workload has a format of data to choose."""
    formats = {"data_format": ("channels_last", "channels_first")} if is_image else {}
    layouts = {"channels_last": (True, False)} if is_image else {}
    threads = {"threads": tuple(dict.fromkeys((cores, 1)))}
    jit, compiled, steps = {"jit": (False, True)}, {"compile": (True, False)}, {"steps_per_execution": (1, 10)}
    return {
        KERAS: Contender(("by_keras.py", "keras-jax"), steps | formats),
        "Keras on TensorFlow": Contender(("by_keras.py", "keras-tensorflow"), threads | jit | steps, "tensorflow"),
        "Keras on torch": Contender(("by_keras.py", "keras-torch"), threads | formats, "torch"),
        "Keras DataParallel on JAX": Contender(("by_keras.py", "keras-jax-data-parallel"), {"devices": (2,)}),
        "tf.distribute": Contender(("by_keras.py", "tf-mirrored"), {"devices": (1, 2)} | jit, "tensorflow"),
        "torch by hand": Contender(("by_torch.py",), threads | compiled | layouts),
        "torch DDP": Contender(("by_torch.py",), {"processes": (2,)} | compiled | layouts),
        LIMIT: Contender(("by_jax.py",), {"form": FORMS}, is_peer=False),
        DEFAULT: Contender(("by_keras.py", "ours"), {}, is_peer=False),
        BEST: Contender(("by_keras.py", "ours"), {"strategy": placements(max(cores, 2))}, is_peer=False),
    }


def placements(devices: int) -> tuple[Settings, ...]:
    """What is written into the brackets of `MirroredStrategy`."""
    one = tuple({"devices": 1, "replicas": replicas} for replicas in (2, 8, 16))
    all_ = tuple({"devices": devices, "replicas": replicas} for replicas in (devices, 2 * devices, 8 * devices))
    return ({}, *one, *all_)
