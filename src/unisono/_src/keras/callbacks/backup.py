"""`BackupAndRestore`: an interrupted fit is resumed, and ends with the same bits. The placement may be another one."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import cast

import keras
import numpy as np

from unisono._src.keras.callbacks import callback_states
from unisono._src.keras.callbacks.save_interval import SaveFrequency, SaveInterval
from unisono._src.keras.checkpoint.background import wait_for_writers
from unisono._src.keras.checkpoint.files import LoadedCheckpoint
from unisono._src.keras.checkpoint.run_checkpoint import RunCheckpoint
from unisono._src.keras.checkpoint.store import CheckpointStore, Keep
from unisono._src.keras.fit.bond import get_bond
from unisono._src.keras.fit.call_arguments import FitCallback
from unisono._src.keras.fit.data_position import DataPosition
from unisono._src.keras.private.callbacks import set_first_epoch
from unisono._src.near_names import says_near_names
from unisono._src.processes.agreement import get_agreement
from unisono._src.processes.stop_signals import SIGNALS, StopRequest, listen_for_signals
from unisono._src.typing import AnyArray, Json, Logs, PyTree

GOES_ON = "The training goes on, and the next save tries again."
"""What follows when the storage did not take a checkpoint."""


class BackupAndRestore(FitCallback):
    """A callback that saves a training of `fit` and resumes it. It is resumed where it stopped, also in the middle of an epoch.

    Start the same program again after an interruption: it goes on, on as many devices as there are now, and every bit
    afterwards is that of a run that was never interrupted. Checkpoints are written in the background.

    Args:
        backup_dir: A directory for this training alone; also with a protocol, like "s3://bucket/run".
        save_freq: "epoch", the default; a number of steps; False for signals alone; or a policy of
            orbax.checkpoint.experimental.v1.training.save_decision_policies, such as one for a number of seconds.
        double_checkpoint: An argument of Keras' callback, without effect. Two checkpoints are kept in any case, so that a damaged
            one costs little; `keep` sets another number.
        delete_checkpoint: Whether the checkpoints are deleted when the training has ended.
        keep: How many checkpoints are kept; or a policy of orbax.checkpoint.experimental.v1.training.preservation_policies, for all
            but the newest.
        signals: Names of signals at which the step is finished, the training is saved, and the program exits with code 75.
        allow_other_replicas: Whether a training with another number of replicas may be resumed. It is another run then.

    Example:
        >>> signals = ("SIGTERM", "SIGINT", "SIGUSR1")
        >>> callback = BackupAndRestore("backup", save_freq=1000, signals=signals)
    """

    keeps_what_others_decide = True

    @says_near_names
    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: SaveFrequency = "epoch",
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
        self._store = CheckpointStore(backup_dir, keep=2 if keep is None else keep)
        self._interval = SaveInterval(save_freq)
        self._open = contextlib.ExitStack()
        self._stop = StopRequest()
        self._place = (0, 0)
        """The epoch that is trained next or now, and its steps that are done."""
        self._saved_place: tuple[int, int] | None = None
        self._metrics: dict[str, AnyArray] | None = None

    # Called by Keras.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        model = cast(keras.Model, self.model)
        bond = get_bond(model)
        if bond is None:
            raise ValueError(
                "unisono's BackupAndRestore resumes trainings of a strategy, and this model was made outside of every scope. Make it inside "
                "strategy.scope(): un.OneDeviceStrategy() trains exactly what Keras trains. Or use keras.callbacks.BackupAndRestore."
            )
        self._bond = bond
        self._run_checkpoint = RunCheckpoint({"model": model})
        self._place = (0, 0)
        self._saved_place = None
        self._interval = SaveInterval(self.save_freq)
        self._stop = self._open.enter_context(self._listen())
        wait_for_writers()  # an earlier fit of this process that was broken off may still be writing
        self._number = self._store.choose_next_number()
        loaded = self._store.load_newest()
        if loaded is not None:
            self._resume(loaded)
        self._run_checkpoint.keep_description()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._place = (epoch, self._place[1])

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        epoch, step = self._place
        self._interval.count_steps(batch + 1 - step, self._store.is_busy)
        self._place = (epoch, batch + 1)
        if self._store.has_failed:
            self._store.settle(GOES_ON)
        if self._stop.is_due:
            self._save_and_leave()
        at_end = self._data_position.epochs.steps == batch + 1 or self._bond.model.stop_training
        if self._interval.is_due and not at_end:  # else it is saved after validation and the other callbacks
            self._save()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self._place[1]:  # a validation of fit: it begins by resetting the metrics, from which the epoch's logs are made
            names = [name for name in self._run_checkpoint.keras.variables if name.startswith("model/metrics/")]
            values = self._run_checkpoint.keras.values()
            self._metrics = {name: np.array(values[name]) for name in names}

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._metrics is not None and self._stop.is_due:
            self._save_and_leave()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._metrics = None
        self._place = (epoch + 1, 0)
        is_asked = self._stop.is_asked_in_any_process()
        if self._interval.after_epochs or self._interval.is_due or is_asked:
            self._save()
        if is_asked:
            self._leave()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._store.settle("The training has come to its end.")
        if self._stop.is_asked_in_any_process():  # the same command finds nothing left to train, and goes on after fit
            if self._saved_place != self._place:
                self._save()
            self._leave()
        self._open.close()  # all is saved: from here on a signal does what it does without us
        if self.delete_checkpoint:
            self._store.delete()

    # Called by our fit.

    def fit_is_over(self) -> None:
        """End the backup, however fit ended.

        An unanswered signal hides no error, and an interrupt does not wait for the writing.
        """
        self._open.__exit__(*sys.exc_info())
        if not isinstance(sys.exception(), KeyboardInterrupt):
            self._store.join()

    def steps_until_due(self, step: int) -> int:
        """Count the steps that one call may take. After the last one the training is saved, or processes may stop."""
        return self._interval.count_steps_until_due() if get_agreement().is_alone else 1

    def _listen(self) -> contextlib.AbstractContextManager[StopRequest]:
        """Note within a block that the training is asked to stop."""
        return listen_for_signals(self.signals)

    # Saving.

    def _save(self) -> None:
        epoch, step = self._place
        position = self._data_position
        training: dict[str, Json] = {
            "epoch": epoch,
            "step": step,
            "stopped": bool(self._bond.model.stop_training) and not step,
            "logs": dict(position.logs) if step else {},
            "data": position.get_state(end_of_epoch=not step),
            "steps": self._interval.steps,
            "validations": self._bond.validations,
        }
        kept = {"training": training, "callbacks": callback_states.collect_states(self._others)}
        self._store.settle(GOES_ON)
        self._path = self._run_checkpoint.save(self._store, self._number, kept, self._metrics)
        self._number += 1
        self._saved_place = self._place
        self._interval.note_saved()

    def _save_and_leave(self) -> None:
        self._save()
        self._leave()

    def _leave(self) -> None:
        self._stop.exit_program(self._store.finish(self._path))

    @property
    def _data_position(self) -> DataPosition:
        return cast(DataPosition, self._bond.data_position)  # fit has one while it calls callbacks

    @property
    def _others(self) -> list[keras.callbacks.Callback]:
        return [callback for callback in self._bond.callbacks if not isinstance(callback, BackupAndRestore)]

    # Resuming.

    def _resume(self, loaded: LoadedCheckpoint) -> None:
        restored = self._run_checkpoint.restore(loaded, ("training", "callbacks"), self.allow_other_replicas)
        training = restored["training"]
        epochs = cast(dict[str, int], self.params)["epochs"]
        first_epoch = epochs if training["stopped"] else training["epoch"]
        if get_agreement().is_first:  # the other processes do not have all callbacks
            self._warn_of_others(loaded, restored["callbacks"])
            self._warn_of_unsaved(first_epoch if first_epoch < epochs else None, training["step"])
        callback_states.set_states(self._others, restored["callbacks"])

        def restore_again() -> None:
            """Restore what callbacks changed at the beginning of the epoch. They did so before the save too."""
            self._run_checkpoint.assign_again(loaded)
            callback_states.set_states(self._others, restored["callbacks"])

        self._place = (training["epoch"], training["step"])
        self._saved_place = self._place
        self._data_position.resume_at(
            training["data"], training["step"], training["logs"], restore_again if training["step"] else None
        )
        self._interval.steps = training["steps"]
        self._bond.resume_validations(training.get("validations", 0))
        self._path = loaded.path
        set_first_epoch(cast(keras.Model, self.model), first_epoch)

    def _warn_of_others(self, loaded: LoadedCheckpoint, states: dict[str, PyTree]) -> None:
        differing = callback_states.list_other_callbacks(self._others, states)
        if differing:
            warnings.warn(
                f"The callbacks are others than those of the checkpoint {loaded.path}: {'; '.join(differing)}. Give fit the same ones, to go on "
                f"with the same run.",
                stacklevel=2,
            )

    def _warn_of_unsaved(self, epoch: int | None, step: int) -> None:
        """Warn of callbacks whose state is not in the checkpoint. `epoch` is None where nothing is left to train."""
        names = callback_states.find_unsaved_callbacks(self._others)
        if names:
            where = "in the middle" if step else "at the beginning"
            goes_on = "has come to its end" if epoch is None else f"goes on {where} of epoch {epoch + 1}"
            warnings.warn(
                f"The training {goes_on}, and {', '.join(names)} may have kept something that is not "
                f"saved. Give a callback get_state(), which returns what JSON knows, and set_state(state).",
                stacklevel=2,
            )
