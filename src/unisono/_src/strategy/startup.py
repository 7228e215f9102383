"""The common start of several processes: the state of their random generators, the structure of their variables, their devices."""

from __future__ import annotations

import random
from collections.abc import Sequence

import jax
import keras
import numpy as np

from unisono._src.keras_private.data_adapters import get_random_seed
from unisono._src.typing import Json


def read_random_state() -> Json:
    """Return the state of the generators from which seeds are drawn, in JSON; None where the user has set a seed, the same for all processes."""
    if get_random_seed() is not None:
        return None
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tolist(), *rest)


def set_random_state(state: Json) -> None:
    if state is not None:
        (version, words, gauss), numpy_state = state
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(numpy_state))


def describe_structure(variables: Sequence[keras.Variable]) -> list[str]:
    """Return a description of each variable that is the same in every process: without names, which Keras numbers as it goes."""
    return [
        f"{tuple(variable.shape)} {variable.dtype} {'trainable' if variable.trainable else 'not trainable'}"
        for variable in variables
    ]


def find_devices_by_id(ids: Sequence[int]) -> tuple[jax.Device, ...]:
    """Return the devices with these ids, of all processes."""
    by_id = {device.id: device for device in jax.devices()}
    return tuple(by_id[id_] for id_ in ids)
