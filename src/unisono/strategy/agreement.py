"""What several processes must agree on, told through the key-value store of `jax.distributed`."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unisono import keras_seam
from unisono.cluster import jax_seam
from unisono.cluster.watch.progress import current

WAIT = 300
"""Seconds for the slowest process."""


class AgreementError(ValueError):
    """Processes that are to train together are about to train different things."""


class Agreement:
    """Every process calls the same methods in the same order."""

    def __init__(self, number: int, processes: int) -> None:
        self._number = number
        self._processes = processes

    def told(self, what: Any) -> list[Any]:
        """What each process says, in JSON."""
        talk = f"unisono/{next(_talks)}"
        jax_seam.client().key_value_set(f"{talk}/{self._number}", json.dumps(what))
        return [self._heard(talk, number) for number in range(self._processes)]

    def of_first(self, what: Any) -> Any:
        """What process 0 says, in JSON."""
        talk = f"unisono/{next(_talks)}"
        if not self._number:
            jax_seam.client().key_value_set(f"{talk}/0", json.dumps(what))
        return self._heard(talk, 0)

    def _heard(self, talk: str, number: int) -> Any:
        with current().waiting():
            return json.loads(jax_seam.client().blocking_key_value_get(f"{talk}/{number}", 1000 * WAIT))

    def any_(self, mine: bool) -> bool:
        """Whether one of them says so."""
        return any(self.told(mine))

    def check(self, mine: dict[str, Any]) -> None:
        """All must say the same."""
        all_ = self.told(mine)
        for number, other in enumerate(all_):
            for name, value in other.items():
                if value != all_[0][name]:
                    raise AgreementError(
                        f"The processes do not agree on {name}: process 0 has {all_[0][name]}, and process {number} has {value}. Start the "
                        f"same program, with the same arguments, in every process."
                    )


_talks = itertools.count()


def random_state() -> Any:
    """That of the generators from which seeds are drawn, in JSON; None where the user has set a seed, which all then share."""
    if keras_seam.get_random_seed() is not None:
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
