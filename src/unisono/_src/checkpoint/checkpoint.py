"""`un.Checkpoint`: the state of a loop of the user's own."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono._src.checkpoint.object_state import KINDS
from unisono._src.checkpoint.reading import DamagedError, load, newest_beside
from unisono._src.checkpoint.run_checkpoint import Saved
from unisono._src.checkpoint.stop_signals import SIGNALS, listening
from unisono._src.checkpoint.store import Keep, Store
from unisono._src.checkpoint.writer import wait_for_all
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import current


class Checkpoint:
    """What a training is made of, saved and restored as a whole.

    Args:
        trackables: By names of your own: models, layers, optimizers, metrics and Keras variables; the distributed dataset that
            is trained on (`data=`); and whatever has `get_state()` and `set_state(state)`.

    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> checkpoint = Checkpoint(model=model)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
        >>> checkpoint.restore(path)
        True
    """

    def __init__(self, **trackables: Any) -> None:
        for name, thing in trackables.items():
            if not name.isidentifier():
                raise ValueError(
                    f"Checkpoint received the name {name!r}. Its names are those of Python's arguments, like model or data_2."
                )
            if not isinstance(thing, KINDS) and not is_stateful(thing):
                raise TypeError(
                    f"Checkpoint({name}=...) received {thing!r} of type {type(thing).__name__}. It keeps models, layers, optimizers, metrics, "
                    f"Keras variables, distributed datasets, and objects with get_state() and set_state(state). Write keras.Variable(...) for "
                    f"a number that changes."
                )
        self._others = {name: thing for name, thing in trackables.items() if not isinstance(thing, KINDS)}
        of_keras = {name: thing for name, thing in trackables.items() if isinstance(thing, KINDS)}
        self._saved = Saved(of_keras, next((dataset.replicas for dataset in self._datasets), None))
        for thing in self._others.values():
            if hasattr(thing, "will_be_saved"):
                thing.will_be_saved()
        self._stores: dict[tuple[Path, str], Store] = {}

    @property
    def _datasets(self) -> list[Any]:
        return [thing for thing in self._others.values() if hasattr(thing, "listeners")]

    @says_near_names
    def save(self, path: str | os.PathLike[str], keep: Keep | None = None) -> str:
        """Writes a numbered checkpoint beside the training, and returns its path.

        Args:
            path: A directory (one that exists, or with "/" at its end), or a prefix like "./ckpts/ckpt".
            keep: How many of them are kept, the newest; or a policy of orbax.checkpoint.experimental.v1.training.preservation_policies.
                By default all.

        A failure is raised by the next `save`, by `wait`, or printed when the process ends.
        """
        self._check_thread()
        directory, name = place_of(path)
        store = self._stores.setdefault((directory, name), Store(directory, name))
        store.keep = keep
        states = {name: thing.get_state() for name, thing in self._others.items()}
        return str(self._saved.save(store, store.next_number(), states))

    def _check_thread(self) -> None:
        if any(dataset.thread not in (None, threading.get_ident()) for dataset in self._datasets):
            warnings.warn(
                f"save was called in the thread {threading.current_thread().name!r}, and the loop over the data runs in another one: what is "
                f"saved may lie within a step. Save in the loop, between two steps; it is written beside the training in any case.",
                stacklevel=4,
            )

    def wait(self) -> None:
        """Until all that was saved is on disk; raises what went wrong."""
        for store in self._stores.values():
            store.wait()

    @says_near_names
    @contextlib.contextmanager
    def saving_on_signal(
        self, path: str | os.PathLike[str], signals: Sequence[str] = SIGNALS, keep: Keep | None = None
    ) -> Iterator[None]:
        """For the block: at one of these signals the step is finished, all is saved, and the program left with exit code 75.

        The step ends where the loop asks the distributed dataset (`data=`) for its next batch. A second signal ends at once.

        Args:
            path: As for `save`.
            signals: Names of signals.
            keep: As for `save`.
        """
        datasets = self._datasets
        if not datasets:
            raise ValueError(
                "saving_on_signal needs the distributed dataset that the loop is over, to know where a step ends. Write Checkpoint(..., "
                "data=dataset)."
            )
        with listening(signals) as stop:

            def save_and_leave() -> None:
                saved = self.save(path, keep)
                self.wait()
                stop.leave(saved)

            def between_batches() -> None:
                if stop.is_due:
                    save_and_leave()

            for dataset in datasets:
                dataset.listeners.append(between_batches)
            try:
                yield
                if stop.is_asked_anywhere():
                    save_and_leave()
            finally:
                for dataset in datasets:
                    dataset.listeners.remove(between_batches)

    @says_near_names
    def restore(self, path: str | os.PathLike[str] | None, allow_other_replicas: bool = False, partial: bool = False) -> bool:
        """Puts back what was saved; a training that goes on from it has the bits of one that was never interrupted.

        Args:
            path: What `save` or `un.latest_checkpoint` returned. With None nothing is done.
            allow_other_replicas: Whether the strategy may have another number of replicas: it is another run then.
            partial: Whether the checkpoint may hold more than is asked for, for evaluation or export.

        Returns:
            Whether something was restored.
        """
        if path is None:
            return False
        current().of_first(f"the checkpoint {path}, which it restores", wait_for_all)
        try:
            loaded = load(path)
        except DamagedError as error:
            good = newest_beside(Path(path).absolute())
            raise DamagedError(f"{error}{'' if good is None else f' {good} is the newest good one beside it.'}") from error
        current().meet(f"that it has read {path}")  # before it may be dropped
        states = self._saved.restore(loaded, set(self._others), allow_other_replicas, partial)
        for name, thing in self._others.items():
            thing.set_state(states[name])
        return True


def is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "get_state", None)) and callable(getattr(thing, "set_state", None))


def place_of(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """(directory, name of the checkpoints in it)."""
    whole = Path(path).absolute()
    is_directory = whole.is_dir() or str(path).endswith(("/", os.sep))
    return (whole, "ckpt") if is_directory else (whole.parent, whole.name)
