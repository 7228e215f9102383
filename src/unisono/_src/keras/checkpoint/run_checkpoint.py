"""One checkpoint of a run: its content, and how it is restored."""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.engine.state import get_step_count
from unisono._src.keras.checkpoint import run_description
from unisono._src.keras.checkpoint.encoding import decode_state, encode_state
from unisono._src.keras.checkpoint.files import LoadedCheckpoint, Record
from unisono._src.keras.checkpoint.object_state import KerasState, KerasThing
from unisono._src.keras.checkpoint.storage import Place
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.keras.ownership import find_strategy
from unisono._src.processes.agreement import get_agreement
from unisono._src.typing import AnyArray, Array, PyTree


class RunCheckpoint:
    """A checkpoint of Keras objects and of other objects' states. All have names. The states are JSON with arrays in it."""

    def __init__(self, things: Mapping[str, KerasThing], replicas: int | None = None) -> None:
        """Take the objects, and R as the data have it."""
        self.keras = KerasState(things)
        self._replicas = replicas
        self._description: Record | None = None

    def _describe_run(self) -> Record:
        """Describe what the bits of the run depend on.

        It is read from the strategy whose scope an object was made in, and from the data.
        """
        strategies = [find_strategy(thing) for thing in self.keras.things.values()]
        strategy = next((strategy for strategy in strategies if strategy is not None), None)
        if strategy is not None and not get_agreement().is_alone and strategy.placement.processes is None:
            # Process 0 saves for all: the others' state would be lost.
            raise ValueError(
                f"This is of {strategy!r}, which trains in this process alone, in a program whose processes train together: process 0 would "
                f"save its own and nobody the others'. Make it in the scope of the MultiWorkerMirroredStrategy."
            )
        return run_description.describe_run(strategy, self._replicas if strategy is None else strategy.num_replicas_in_sync)

    def keep_description(self) -> None:
        """Keep the description of the objects.

        It does not change from here on. While a loop of Keras holds the state, optimizers cannot tell their settings.
        """
        self._description = self.keras.describe()

    def save(
        self, store: CheckpointStore, number: int, states: Mapping[str, PyTree], values: Mapping[str, AnyArray] | None = None
    ) -> Place:
        """Begin to write the present state, and give the path.

        Later training does not change what is written. `values` replace the values of the variables that have these names.
        """
        run = self._describe_run()
        if not get_agreement().is_first:
            return store.path(number)
        current_values = self.keras.values() | dict(values or {})
        encoded, state_arrays = encode_state(dict(states))
        copies = copy_donated(current_values)
        fingerprints = {name: self.keras.fingerprint(name) for name in self.keras.things}
        steps = get_step_count().steps
        record = run | (self._description or self.keras.describe()) | {"states": encoded, "steps": steps}

        def make_content() -> tuple[dict[str, np.ndarray], Record]:
            arrays = {name: np.asarray(value) for name, value in (current_values | copies | state_arrays).items()}
            return arrays, record | {"fingerprints": {name: fingerprint(arrays) for name, fingerprint in fingerprints.items()}}

        return store.save(number, make_content)

    def restore(
        self, loaded: LoadedCheckpoint, names: Collection[str], allow_other_replicas: bool = False, partial: bool = False
    ) -> dict[str, PyTree]:
        """Compare everything, then restore the variables.

        The result is the states of the other objects, which have these names. Layers and optimizers are built before their shapes
        can be compared. Nothing that has a value is changed until all is compared.
        """
        where = str(loaded.path)
        record = loaded.record
        run = self._describe_run()
        theirs = {*record["fingerprints"], *record["states"]}
        run_description.check_objects(where, theirs, {*self.keras.things, *names}, partial)
        run_description.check_same_replicas(where, record["replicas"], run["replicas"], allow_other_replicas)
        if run["replicas"] is not None:
            run_description.check_same_kernels(where, run_description.read_device_kind(record), run["device"])
        run_description.check_same_optimizers(where, record["optimizers"], self.keras.optimizers)
        unbuilt = self.keras.build(where, record)
        self.keras.put(where, loaded.arrays, partial)
        for text in [*unbuilt, *run_description.describe_differences(where, record, run | self.keras.describe())]:
            warnings.warn(text, stacklevel=4)
        get_step_count().steps = record.get("steps", get_step_count().steps)  # older checkpoints do not know it
        return decode_state(record["states"], loaded.arrays)

    def assign_again(self, loaded: LoadedCheckpoint) -> None:
        """Assign the variables of a checkpoint that was just restored, once more."""
        self.keras.put(str(loaded.path), loaded.arrays)


def copy_donated(values: Mapping[str, AnyArray]) -> dict[str, Array]:
    """Copy the values whose memory a step may be given. No step is given that of weights that lie cut over devices."""
    by_devices: dict[frozenset[jax.Device], list[str]] = collections.defaultdict(list)
    for name, value in values.items():
        if isinstance(value, jax.Array) and value.is_fully_replicated:
            by_devices[frozenset(value.devices())].append(name)
    copies = [zip(names, copy_on_device([values[name] for name in names]), strict=True) for names in by_devices.values()]
    return dict(itertools.chain.from_iterable(copies))


@jax.jit
def copy_on_device(arrays: list[AnyArray]) -> list[Array]:
    """Copy arrays on their device, once they are computed. No thread waits, and the next step may be donated the originals."""
    return [jnp.copy(array) for array in arrays]
