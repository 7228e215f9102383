"""One checkpoint of a run: what goes into it, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unisono._src.checkpoint import compatibility, configuration, run_description
from unisono._src.checkpoint.encoding import STATES, joined, separated
from unisono._src.checkpoint.host_copies import copied
from unisono._src.checkpoint.object_state import KerasState
from unisono._src.checkpoint.reading import Loaded
from unisono._src.checkpoint.store import Store
from unisono._src.ownership import strategy_of
from unisono._src.processes.agreement import current


class Saved:
    """Of some named Keras objects, and of named states of other things, which are JSON with arrays in it."""

    def __init__(self, things: Mapping[str, Any], replicas: int | None = None) -> None:
        """`replicas`: R, as the data have it."""
        self.keras = KerasState(things)
        self._replicas = replicas
        self._make: dict[str, Any] | None = None

    def _strategy(self) -> Any:
        """In whose scope something of this was made; None outside of every scope."""
        strategies = [strategy_of(thing) for thing in self.keras.things.values()]
        strategy = next((strategy for strategy in strategies if strategy is not None), None)
        check_together(strategy)
        return strategy

    def _run(self, strategy: Any) -> dict[str, Any]:
        """What the run is: of the strategy, and of the data."""
        return run_description.of_run(strategy, self._replicas if strategy is None else strategy.num_replicas_in_sync)

    def make_is_known(self) -> None:
        """From here on the objects stay of the make that they are of, which need not be looked at again: while a loop of Keras holds the
        state, optimizers cannot say their settings."""
        self._make = self._found_make()

    def _found_make(self) -> dict[str, Any]:
        return {
            "build": self.keras.makes(),
            "optimizers": self.keras.optimizers(),
            "policies": self.keras.policies(),
            "configuration": self.keras.configuration(),
        }

    def save(self, store: Store, number: int, states: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> Path:
        """Begins to write what is now; what is trained meanwhile does not change it.

        `values` stand in place of what the variables of these names hold.
        """
        strategy = self._strategy()
        if not store.writes:
            return store.path(number)
        held = self.keras.values() | dict(values or {})
        plain, arrays = separated(dict(states))
        on_device = [name for name, value in held.items() if not isinstance(value, np.ndarray)]
        copies = dict(zip(on_device, copied([held[name] for name in on_device]), strict=True))
        digests = {name: self.keras.fingerprint(name) for name in self.keras.things}
        record = self._run(strategy) | (self._make or self._found_make()) | {"states": plain}

        def on_host() -> Mapping[str, np.ndarray]:
            return {name: np.asarray(value) for name, value in (held | copies | arrays).items()}

        def whole_record(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
            return record | {"fingerprints": {name: digest(found) for name, digest in digests.items()}}

        return store.save(number, on_host, whole_record)

    def restore(
        self, loaded: Loaded, names: Collection[str], allow_other_replicas: bool = False, partial: bool = False
    ) -> dict[str, Any]:
        """Puts the variables back, after everything was compared; returns the states of the other things, which have these names."""
        where, record, ours = str(loaded.path), loaded.record, self._run(self._strategy())
        held, arrays = apart(loaded.arrays)
        theirs = record["fingerprints"].keys() | record["states"].keys()
        compatibility.check_names(where, theirs, {*self.keras.things, *names}, partial)
        run_description.check_replicas(where, record, ours, allow_other_replicas)
        self.keras.build(where, record["build"], record["optimizers"])
        run_description.check_optimizers(where, record["optimizers"], self.keras.optimizers())
        self.keras.put(where, held, partial)
        run_description.warn_of_others(where, record, ours, record["policies"], self.keras.policies())
        configuration.warn_of_others(where, record.get("configuration", {}), self.keras.configuration())
        self._check_bits(where, record["fingerprints"], held)
        return joined(record["states"], arrays)

    def put_again(self, loaded: Loaded) -> None:
        """The variables alone, of a checkpoint that was restored just now."""
        self.keras.put(str(loaded.path), apart(loaded.arrays)[0])

    def _check_bits(self, where: str, theirs: Mapping[str, str], held: Mapping[str, np.ndarray]) -> None:
        """By the fingerprints; of what is here in part, by its arrays."""
        values = {name: np.asarray(value) for name, value in self.keras.values().items()}
        for name in self.keras.things:
            ours = self.keras.fingerprint(name)(values) if self.keras.is_whole(name, held) else theirs[name]
            names = sorted(self.keras.names_of(name, values))
            other = next((of for of in names if of in held and values[of].tobytes() != held[of].tobytes()), None)
            if ours != theirs[name] or other:
                what = f"{other} has other bits now" if other else f"has the fingerprint {ours} now instead of {theirs[name]}"
                raise RuntimeError(
                    f"{name} was restored from the checkpoint {where}, and {what}. Please report this with the model that shows it; do not "
                    f"train on."
                )


def check_together(strategy: Any) -> None:
    """One process saves for all: what each trains by itself would be lost."""
    if strategy is not None and not current().is_alone and strategy.placement.processes is None:
        raise ValueError(
            f"This is of {strategy!r}, which trains in this process alone, in a program whose processes train together: process 0 would save "
            f"its own and nobody the others'. Make it in the scope of the MultiWorkerMirroredStrategy."
        )


def apart(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(those of variables, those of states)."""
    of_states = {name: array for name, array in arrays.items() if name.startswith(STATES)}
    return {name: array for name, array in arrays.items() if name not in of_states}, of_states
