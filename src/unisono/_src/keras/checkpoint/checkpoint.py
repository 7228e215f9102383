"""`un.Checkpoint`: the state of a training loop that the user wrote."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

import keras

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.checkpoint.background import wait_for_writers
from unisono._src.keras.checkpoint.files import DamagedError, load_checkpoint
from unisono._src.keras.checkpoint.latest import find_checkpoints, read_first_good, refuse_missing
from unisono._src.keras.checkpoint.object_state import KerasThing
from unisono._src.keras.checkpoint.run_checkpoint import RunCheckpoint
from unisono._src.keras.checkpoint.storage import Place, find_place
from unisono._src.keras.checkpoint.store import CheckpointStore, Keep
from unisono._src.near_names import says_near_names
from unisono._src.placement import Placement
from unisono._src.processes.agreement import get_agreement
from unisono._src.processes.stop_signals import SIGNALS, listen_for_signals
from unisono._src.typing import PyTree


class Stateful(Protocol):
    """An object that has a state which JSON and arrays can hold."""

    def get_state(self) -> PyTree: ...

    def set_state(self, state: PyTree, /) -> None: ...


@runtime_checkable
class LoopDataset(Protocol):
    """A distributed dataset, as `Checkpoint` uses it. No other object has all of these."""

    listeners: list[Callable[[], None]]
    """The functions that are called between two batches."""
    thread: int | None
    """The thread that asked for the last batch."""

    @property
    def placement(self) -> Placement: ...

    def will_be_saved(self) -> None: ...


Trackable: TypeAlias = KerasThing | keras.random.SeedGenerator | Stateful
"""An object that `Checkpoint` saves."""

Trackables: TypeAlias = "Trackable | Sequence[Trackables] | Mapping[str, Trackables]"
"""An object that `Checkpoint` saves, or a list, a tuple or a dict of such objects."""


class Checkpoint:
    """The state of a training, saved and restored as a whole.

    Args:
        trackables: The objects, by names of your own: models, layers, optimizers, metrics, Keras variables and seed generators; the
            distributed dataset of the loop (`data=`); any object with `get_state()` and `set_state(state)`; and lists, tuples and
            dicts of these.

    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> checkpoint = Checkpoint(model=model)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
        >>> checkpoint.restore(path)
        True
    """

    def __init__(self, **trackables: Trackables) -> None:
        with PUBLIC_CALL:
            wrong = next((name for name in trackables if not name.isidentifier()), None)
            if wrong is not None:
                raise ValueError(
                    f"Checkpoint received the name {wrong!r}. Its names are those of Python's arguments, like model or data_2."
                )
            self._stateful: dict[str, Stateful] = {}
            keras_things: dict[str, KerasThing] = {}
            for name, thing in open_containers(trackables.items()):
                if isinstance(thing, KerasThing):
                    keras_things[name] = thing
                elif isinstance(thing, keras.random.SeedGenerator):
                    keras_things[name] = thing.state
                elif is_stateful(thing):
                    self._stateful[name] = thing
                else:
                    raise TypeError(
                        f"Checkpoint({name}=...) received {thing!r} of type {type(thing).__name__}. It keeps models, layers, optimizers, metrics, "
                        f"Keras variables, seed generators, distributed datasets, objects with get_state() and set_state(state), and lists and "
                        f"dicts of these. Write keras.Variable(...) for a number that changes."
                    )
            self._datasets = [thing for thing in self._stateful.values() if isinstance(thing, LoopDataset)]
            for dataset in self._datasets:
                dataset.will_be_saved()
            self._run_checkpoint = RunCheckpoint(
                keras_things, next((dataset.placement.replicas for dataset in self._datasets), None)
            )
            self._stores: dict[tuple[Place, str], CheckpointStore] = {}

    @says_near_names
    def save(self, path: str | os.PathLike[str], keep: Keep | None = None) -> str:
        """Write a numbered checkpoint in the background, and return its path.

        Args:
            path: A directory (one that exists, or with "/" at its end), or a prefix like "./ckpts/ckpt"; also with a protocol, like
                "s3://bucket/run/".
            keep: How many of the newest checkpoints are kept; or a policy of
                orbax.checkpoint.experimental.v1.training.preservation_policies. By default all are kept.

        A failure is raised by the next `save`, which writes its own checkpoint all the same, or by `wait`, or printed when the process ends.
        """
        if any(dataset.thread not in (None, threading.get_ident()) for dataset in self._datasets):
            warnings.warn(
                f"save was called in the thread {threading.current_thread().name!r}, and the loop over the data runs in another one: what is "
                f"saved may lie within a step. Save in the loop, between two steps; it is written beside the training in any case.",
                stacklevel=3,
            )
        store = self._find_store(path)
        store.keep = keep
        states = {name: thing.get_state() for name, thing in self._stateful.items()}
        return str(self._run_checkpoint.save(store, store.choose_next_number(), states))

    def wait(self) -> None:
        """Wait until all checkpoints are on disk. The error of one that was not written is raised."""
        with PUBLIC_CALL:
            for store in self._stores.values():
                store.wait()

    def _find_store(self, path: str | os.PathLike[str]) -> CheckpointStore:
        place = find_place(path)
        folder, prefix = (place, "ckpt"), (place.parent, place.name)
        is_known = folder in self._stores or prefix in self._stores  # then the storage is not asked, which may not answer
        is_folder = folder in self._stores if is_known else place.is_folder()
        key = folder if is_folder or os.fspath(path).endswith("/") else prefix
        return self._stores.setdefault(key, CheckpointStore(*key))

    @says_near_names
    @contextlib.contextmanager
    def saving_on_signal(
        self, path: str | os.PathLike[str], signals: Sequence[str] = SIGNALS, keep: Keep | None = None
    ) -> Iterator[None]:
        """Save and leave at a signal, within the block. The step is finished, all is saved, and the program exits with code 75.

        The step ends where the loop asks the distributed dataset (`data=`) for its next batch. A second signal ends at once.

        Args:
            path: As for `save`.
            signals: Names of signals.
            keep: As for `save`.
        """
        if not self._datasets:
            raise ValueError(
                "saving_on_signal needs the distributed dataset that the loop is over, to know where a step ends. Write Checkpoint(..., "
                "data=dataset)."
            )
        with listen_for_signals(signals) as stop:

            def save_and_leave() -> None:
                for store in self._stores.values():
                    store.settle("It is saved again before the program exits.")
                saved = find_place(self.save(path, keep))
                stop.exit_program(self._find_store(path).finish(saved))

            def between_batches() -> None:
                if stop.is_due:
                    save_and_leave()

            for dataset in self._datasets:
                dataset.listeners.append(between_batches)
            try:
                yield
                if stop.is_asked_in_any_process():
                    save_and_leave()
            finally:
                for dataset in self._datasets:
                    dataset.listeners.remove(between_batches)

    @says_near_names
    def restore(self, path: str | os.PathLike[str] | None, allow_other_replicas: bool = False, partial: bool = False) -> bool:
        """Restore what was saved. A training that goes on from there has the bits of one that was never interrupted.

        Args:
            path: What `save` or `un.latest_checkpoint` returned. With None nothing is restored.
            allow_other_replicas: Whether the strategy may have another number of replicas. It is another run then.
            partial: Whether the checkpoint may hold more objects than are asked for, as evaluation or export needs it.

        Returns:
            Whether something was restored.
        """
        if path is None:
            return False
        get_agreement().of_first(f"the checkpoint {path}, which it restores", wait_for_writers)
        place = find_place(path)
        refuse_missing(place)
        try:
            loaded = load_checkpoint(place)
        except DamagedError as error:

            def list_others() -> list[Place]:
                checkpoints = find_checkpoints(place.parent, place.name.rpartition("_")[0])
                return [folder for _, _, folder in reversed(checkpoints) if folder != place]

            found, _ = read_first_good(list_others, load_checkpoint)
            beside = "" if found is None else f" {found[0]} is the newest good one beside it."
            raise DamagedError(f"{error}{beside}") from error
        get_agreement().wait_for_processes(f"that it has read {path}")  # before process 0 may remove it
        states = self._run_checkpoint.restore(loaded, set(self._stateful), allow_other_replicas, partial)
        for name, thing in self._stateful.items():
            thing.set_state(states[name])
        return True


def open_containers(things: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield (name, object), with the items of lists, tuples and dicts. Items have names like `towers[0]`.

    >>> list(open_containers([("a", 1), ("b", [2, {"c": 3}])]))
    [('a', 1), ('b[0]', 2), ("b[1]['c']", 3)]
    """
    for name, thing in things:
        if is_stateful(thing):
            yield name, thing
        elif isinstance(thing, list | tuple):
            yield from open_containers((f"{name}[{index}]", item) for index, item in enumerate(thing))
        elif isinstance(thing, Mapping):
            yield from open_containers((f"{name}[{key!r}]", item) for key, item in thing.items())
        else:
            yield name, thing


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Whether an object has `get_state()` and `set_state(state)`."""
    return callable(getattr(thing, "get_state", None)) and callable(getattr(thing, "set_state", None))
