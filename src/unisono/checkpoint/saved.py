"""One checkpoint of a run: what goes into it, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unisono import keras_seam
from unisono.checkpoint import facts, matching
from unisono.checkpoint.arrays import copied
from unisono.checkpoint.leaves import STATES, joined, separated
from unisono.checkpoint.state import KerasState
from unisono.checkpoint.store import Loaded, Store


class Saved:
    """Of some named Keras objects, and of named states of other things, which are JSON with arrays in it."""

    def __init__(self, things: Mapping[str, Any]) -> None:
        self.keras = KerasState(things)
        self._make: dict[str, Any] | None = None

    @property
    def strategy(self) -> Any:
        """In whose scope a model among them was made; None outside of every scope."""
        bonds = [keras_seam.bond_of(thing) for thing in self.keras.things.values()]
        return next((bond.strategy for bond in bonds if bond is not None), None)

    def make_is_known(self) -> None:
        """From here on the objects stay of the make that they are of, which need not be looked at again: while a loop of Keras holds the
        state, optimizers cannot say their settings."""
        self._make = self._found_make()

    def _found_make(self) -> dict[str, Any]:
        return {"build": self.keras.makes(), "optimizers": self.keras.optimizers(), "policies": self.keras.policies()}

    def save(self, store: Store, number: int, states: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> Path:
        """Begins to write what is now; what is trained meanwhile does not change it.

        `values` stand in place of what the variables of these names hold.
        """
        held = self.keras.values() | dict(values or {})
        plain, arrays = separated(dict(states))
        on_device = [name for name, value in held.items() if not isinstance(value, np.ndarray)]
        copies = dict(zip(on_device, copied([held[name] for name in on_device]), strict=True))
        digests = {name: self.keras.fingerprint(name) for name in self.keras.things}
        record = facts.of_run(self.strategy) | (self._make or self._found_make()) | {"states": plain}

        def on_host() -> Mapping[str, np.ndarray]:
            return {name: np.asarray(value) for name, value in (held | copies | arrays).items()}

        def whole_record(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
            return record | {"fingerprints": {name: digest(found) for name, digest in digests.items()}}

        return store.save(number, on_host, whole_record)

    def restore(
        self, loaded: Loaded, names: Collection[str], allow_other_replicas: bool = False, partial: bool = False
    ) -> dict[str, Any]:
        """Puts the variables back, after everything was compared; returns the states of the other things, which have these names."""
        where, record, ours = str(loaded.path), loaded.record, facts.of_run(self.strategy)
        held, arrays = apart(loaded.arrays)
        theirs = record["fingerprints"].keys() | record["states"].keys()
        matching.check_names(where, theirs, {*self.keras.things, *names}, partial)
        facts.check_replicas(where, record, ours, allow_other_replicas)
        self.keras.build(where, record["build"], record["optimizers"])
        facts.check_optimizers(where, record["optimizers"], self.keras.optimizers())
        self.keras.put(where, held, partial)
        facts.warn_of_others(where, record, ours, record["policies"], self.keras.policies())
        if not partial:
            self._check_fingerprints(where, record["fingerprints"])
        return joined(record["states"], arrays)

    def put_again(self, loaded: Loaded) -> None:
        """The variables alone, of a checkpoint that was restored just now."""
        self.keras.put(str(loaded.path), apart(loaded.arrays)[0])

    def _check_fingerprints(self, where: str, theirs: Mapping[str, str]) -> None:
        values = {name: np.asarray(value) for name, value in self.keras.values().items()}
        for name in self.keras.things:
            ours = self.keras.fingerprint(name)(values)
            if ours != theirs[name]:
                raise RuntimeError(
                    f"{name} was restored from the checkpoint {where}, and has the fingerprint {ours} now instead of {theirs[name]}. Please "
                    f"report this with the model that shows it; do not train on."
                )


def apart(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(those of variables, those of states)."""
    of_states = {name: array for name, array in arrays.items() if name.startswith(STATES)}
    return {name: array for name, array in arrays.items() if name not in of_states}, of_states
