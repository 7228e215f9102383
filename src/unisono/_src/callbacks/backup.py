"""`BackupAndRestore`: a fit that was interrupted goes on where it was, on any placement, and ends with the same bits."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from unisono._src import keras_private
from unisono._src.callbacks import callback_states
from unisono._src.callbacks.save_interval import Interval
from unisono._src.checkpoint.reading import Loaded
from unisono._src.checkpoint.run_checkpoint import Saved
from unisono._src.checkpoint.stop_signals import SIGNALS, Stop, listening
from unisono._src.checkpoint.store import Keep, Store
from unisono._src.checkpoint.writer import wait_for_all
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import current


class BackupAndRestore(keras.callbacks.Callback):
    """Saves a training of `fit` as it goes, and takes it up again where it was, in the middle of an epoch too.

    Start the same program again after an interruption: it goes on, on as many devices as there are now, and every bit
    afterwards is that of a run that was never interrupted. Saving runs beside the training.

    Args:
        backup_dir: A directory for this training alone.
        save_freq: "epoch", the default; a number of steps; False for signals alone; or a policy of
            orbax.checkpoint.experimental.v1.training.save_decision_policies, such as one for a number of seconds.
        double_checkpoint: Keras' argument. Two checkpoints are kept in any case, so that a damaged one costs little; `keep` says
            another number.
        delete_checkpoint: Whether they are deleted when the training has come to its end.
        keep: How many checkpoints are kept, or a policy of orbax.checkpoint.experimental.v1.training.preservation_policies, beside the
            newest.
        signals: Names of signals at which the step is finished, the training saved, and the program left with exit code 75.
        allow_other_replicas: Whether a training with another number of replicas may be taken up: it is another run then.

    Example:
        >>> callback = BackupAndRestore("backup", save_freq=1000, signals=("SIGTERM", "SIGINT", "SIGUSR1"))
    """

    keeps_what_others_decide = True

    @says_near_names
    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Any = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        keep: Keep | None = None,
        signals: Sequence[str] = SIGNALS,
        allow_other_replicas: bool = False,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ValueError("BackupAndRestore received an empty backup_dir. Name a directory for this training alone.")
        self.backup_dir = backup_dir
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.signals = tuple(signals)
        self.allow_other_replicas = allow_other_replicas
        self._store = Store(backup_dir, keep=2 if keep is None else keep)
        self._interval = Interval(save_freq, self._is_saving)
        self._open = contextlib.ExitStack()
        self._stop = Stop()
        self._epoch = self._step = self._epochs_done = 0
        self._saved_at: tuple[int, int] | None = None
        self._metrics: dict[str, Any] | None = None

    # What Keras calls.

    def on_train_begin(self, logs: Any = None) -> None:
        self._bond = bond_of(self.model)
        self._saved = Saved({"model": self.model})
        self._epoch = self._step = self._epochs_done = 0
        self._saved_at = None
        self._interval = Interval(self.save_freq, self._is_saving)
        self._stop = self._open.enter_context(listening(self.signals))
        wait_for_all()  # a fit of this process that was broken off may still be writing
        self._number = self._store.next_number()
        loaded = self._store.newest()
        if loaded is not None:
            self._go_on(loaded)
        self._saved.make_is_known()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._interval.passed(batch + 1 - self._step)
        self._step = batch + 1
        if self._stop.is_due:
            self._save_and_leave()
        at_end = self._bond.course.epochs.steps == self._step or self._bond.model.stop_training
        if self._interval.is_due and not at_end:  # there it is saved when validation and the other callbacks are through
            self._save(self._epoch, self._step)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._step:  # a validation of fit: it begins by resetting the metrics, of which the epoch's logs are made
            names = [name for name in self._saved.keras.variables if name.startswith("model/metrics/")]
            values = self._saved.keras.values()
            self._metrics = {name: np.array(values[name]) for name in names}

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._metrics is not None and self._stop.is_due:
            self._save_and_leave()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._metrics, self._step, self._epochs_done = None, 0, epoch + 1
        is_asked = self._stop.is_asked_anywhere()
        if self._interval.after_epochs or self._interval.is_due or is_asked:
            self._save(epoch + 1, 0)
        if is_asked:
            self._leave()

    def on_train_end(self, logs: Any = None) -> None:
        self._store.wait()
        if self._stop.is_asked_anywhere():
            self._save_end_and_leave()
        self._open.close()  # from here on a signal does what it does without us: nothing is left to be saved
        if self.delete_checkpoint:
            self._store.delete()

    # What our fit calls.

    def fit_is_over(self) -> None:
        """However it ended: an error is not lost over a signal that nobody has answered, and one that ends at once does not wait."""
        self._open.__exit__(*sys.exc_info())
        if not isinstance(sys.exception(), KeyboardInterrupt):
            self._store.join()

    def steps_until_due(self, step: int) -> int:
        """How many steps may come at once before one that is saved, or behind which several processes may stop."""
        return self._interval.until_due() if current().is_alone else 1

    # Saving.

    def _is_saving(self) -> bool:
        return self._store.is_busy

    def _save(self, epoch: int, step: int) -> None:
        course = self._bond.course
        training = {
            "epoch": epoch,
            "step": step,
            "stopped": bool(self._bond.model.stop_training) and not step,
            "logs": dict(course.logs) if step else {},
            "data": course.get_state(end_of_epoch=not step),
            "steps": self._interval.steps,
        }
        kept = {"training": training, "callbacks": callback_states.states_of(self._others)}
        self._path = self._saved.save(self._store, self._number, kept, self._metrics)
        self._number += 1
        self._saved_at = epoch, step
        self._interval.saved()

    def _save_and_leave(self) -> None:
        self._save(self._epoch, self._step)
        self._leave()

    def _save_end_and_leave(self) -> None:
        """When all epochs are done. The same command finds nothing left to train, and goes on behind fit."""
        if self._saved_at != (self._epochs_done, 0):
            self._save(self._epochs_done, 0)
        self._leave()

    def _leave(self) -> None:
        self._store.wait()
        self._stop.leave(self._path)

    @property
    def _others(self) -> list[Any]:
        return [callback for callback in self._bond.callbacks if not isinstance(callback, BackupAndRestore)]

    # Going on.

    def _go_on(self, loaded: Loaded) -> None:
        restored = self._saved.restore(loaded, ("training", "callbacks"), self.allow_other_replicas)
        training, step = restored["training"], restored["training"]["step"]
        if current().is_first:  # which has all callbacks
            self._warn_of_others(loaded, restored["callbacks"])
            self._warn_of_unknown(training)
        callback_states.set_states(self._others, restored["callbacks"])

        def again() -> None:
            """What callbacks did at the beginning of the epoch was done before, and must not count twice."""
            self._saved.put_again(loaded)
            callback_states.set_states(self._others, restored["callbacks"])

        self._bond.course.go_on(training["data"], step, training["logs"], again if step else None)
        self._epoch, self._step, self._interval.steps = training["epoch"], step, training["steps"]
        self._epochs_done, self._saved_at, self._path = training["epoch"], (training["epoch"], step), loaded.path
        params: Any = self.params
        keras_private.begin_with_epoch(self.model, params["epochs"] if training["stopped"] else training["epoch"])

    def _warn_of_others(self, loaded: Loaded, found: dict[str, Any]) -> None:
        lost, fresh = callback_states.lost(self._others, found), callback_states.fresh(self._others, found)
        said = [f"it holds the state of {name}, which is not among the callbacks now" for name in lost]
        said += [f"{name} is among the callbacks now, and begins anew" for name in fresh]
        if said:
            warnings.warn(
                f"The callbacks are others than those of the checkpoint {loaded.path}: {'; '.join(said)}. Give fit the same ones, to go on "
                f"with the same run.",
                stacklevel=2,
            )

    def _warn_of_unknown(self, training: dict[str, Any]) -> None:
        names = callback_states.unknown(self._others)
        if names:
            where = "in the middle" if training["step"] else "at the beginning"
            warnings.warn(
                f"The training goes on {where} of epoch {training['epoch'] + 1}, and {', '.join(names)} may have kept something that is not "
                f"saved. Give a callback get_state(), which returns what JSON knows, and set_state(state).",
                stacklevel=2,
            )


def bond_of(model: Any) -> Any:
    bond = keras_private.bond_of(model)
    if bond is None:
        raise ValueError(
            "unisono's BackupAndRestore resumes trainings of a strategy, and this model was made outside of every scope. Make it inside "
            "strategy.scope(): un.OneDeviceStrategy() trains exactly what Keras trains. Or use keras.callbacks.BackupAndRestore."
        )
    return bond
