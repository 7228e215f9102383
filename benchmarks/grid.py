"""Who takes part, and with which settings each may choose its fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

Settings = dict[str, Any]


class Contender(NamedTuple):
    """One way to train.

    Args:
        command: The script, and what stands before the name of the workload.
        grid: What it may choose from.
        backend: Of Keras.
        is_peer: Whether it is somebody else's, and not the limit.
    """

    command: tuple[str, ...]
    grid: tuple[Settings, ...]
    backend: str = "jax"
    is_peer: bool = True


DEFAULT, BEST, LIMIT, KERAS = "Unisono, default", "Unisono, best", "JAX by hand", "Keras on JAX"


def product(**choices: Iterable[Any]) -> tuple[Settings, ...]:
    return tuple(dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))


def placements(devices: int) -> tuple[Settings, ...]:
    one = tuple({"kind": "one device", "strategy": {"replicas": replicas}} for replicas in (2, 4, 8, 16))
    all_ = tuple({"strategy": {"devices": devices, "replicas": replicas}} for replicas in (2, 4, 8, 16))
    return ({}, *one, *all_)


def contenders(cores: int, is_image: bool) -> dict[str, Contender]:
    """`is_image`: whether the workload has a format of data to choose."""
    formats = {"data_format": ("channels_last", "channels_first")} if is_image else {}
    layouts = {"channels_last": (True, False)} if is_image else {}
    threads, devices = tuple(dict.fromkeys((1, cores))), max(cores, 2)
    jits = {"jit": (True, False)}
    return {
        KERAS: Contender(("by_keras.py", "keras-jax"), product(steps_per_execution=(1, 10), **formats)),
        "Keras on TensorFlow": Contender(
            ("by_keras.py", "keras-tensorflow"), product(**jits, threads=threads, steps_per_execution=(1, 10)), "tensorflow"
        ),
        "Keras on torch": Contender(("by_keras.py", "keras-torch"), product(threads=threads, **formats), "torch"),
        "Keras DataParallel on JAX": Contender(("by_keras.py", "keras-jax-data-parallel"), product(devices=(2,))),
        "tf.distribute": Contender(("by_keras.py", "tf-mirrored"), product(devices=(1, 2), **jits), "tensorflow"),
        "torch by hand": Contender(("by_torch.py",), product(threads=threads, compile=(True, False), **layouts)),
        "torch DDP": Contender(("by_torch.py",), product(processes=(2,), compile=(True, False), **layouts)),
        LIMIT: Contender(("by_jax.py",), product(steps_per_call=(1, 2, 10), rewritten=(False, True)), is_peer=False),
        DEFAULT: Contender(("by_keras.py", "ours"), ({},), is_peer=False),
        BEST: Contender(("by_keras.py", "ours"), placements(devices), is_peer=False),
    }
