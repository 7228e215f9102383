"""What several processes have in common when they begin: the state of their random generators, structures, devices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unisono._src import keras_private


def random_state() -> Any:
    """That of the generators from which seeds are drawn, in JSON; None where the user has set a seed, which all then share."""
    if keras_private.get_random_seed() is not None:
        return None
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tolist(), *rest)


def set_random_state(state: Any) -> None:
    if state is not None:
        (version, words, gauss), of_numpy = state
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(of_numpy))


def structure_of(variables: Sequence[Any]) -> list[str]:
    """What must be the same in every process, in order: never names, which Keras numbers as it goes."""
    return [f"{tuple(v.shape)} {v.dtype} {'trainable' if v.trainable else 'not trainable'}" for v in variables]


def devices_of(ids: Sequence[int]) -> tuple[jax.Device, ...]:
    by_id = {device.id: device for device in jax.devices()}
    return tuple(by_id[id_] for id_ in ids)
