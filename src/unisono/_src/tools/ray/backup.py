"""`un.ray.Backup`: the checkpoints of a fit lie in Ray's storage, and Ray starts the training again from the last one."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from unisono._src.keras.callbacks.backup import GOES_ON, BackupAndRestore
from unisono._src.keras.checkpoint.files import LoadedCheckpoint, load_checkpoint
from unisono._src.keras.checkpoint.storage import Place, find_place
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.processes.activity import get_activity
from unisono._src.processes.agreement import get_agreement
from unisono._src.processes.stop_signals import StopRequest
from unisono._src.tools.ray.installed import import_ray
from unisono._src.tools.ray.local_folder import find_local_folder
from unisono._src.typing import Logs

SECONDS = 1.0
"""How often Ray is asked whether it takes a node away. All workers wait for one another then, for some milliseconds."""


class Backup(BackupAndRestore):
    """A callback for `fit` in a function that Ray Train runs. It reports metrics and checkpoints to Ray, and resumes from Ray's last checkpoint.

    Checkpoints go to `RunConfig(storage_path=)` in the background, on a local disk or wherever else Ray writes, each with the metrics of its step,
    the last one when the training has ended. If Ray announces that a node will be taken away, the training is saved at once, and goes on until
    then. `RunConfig(checkpoint_config=)` says which checkpoints are kept.

    Args:
        save_freq: "epoch", the default; a number of steps; or False, to save at the end and before a node is taken away.
        allow_other_replicas: Whether a training with another number of replicas may be resumed. It is another run then.

    Example:
        >>> callback = un.ray.Backup(save_freq=1000)  # doctest: +SKIP
    """

    _has_begun = False
    """Whether this process, which Ray starts for one call of the function, has begun to back up a fit."""

    def __init__(self, save_freq: str | int = "epoch", *, allow_other_replicas: bool = False) -> None:
        if not isinstance(save_freq, str | int):
            raise ValueError(
                f"un.ray.Backup received save_freq={save_freq!r}. All workers save at the same step: write 'epoch', a number of steps, or False."
            )
        super().__init__(tempfile.gettempdir(), save_freq, signals=(), allow_other_replicas=allow_other_replicas)
        self._train = import_ray().train
        self._logs: Logs = {}
        self._is_uploaded = threading.Event()
        self._is_uploaded.set()

    # Called by Keras.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if Backup._has_begun:
            raise ValueError(
                "un.ray.Backup backs up one fit of a function, and this is the second: Ray resumes from the last checkpoint alone, and would not "
                "know which fit it is of. Give one of them un.callbacks.BackupAndRestore('folder', signals=()), in a folder that all workers share."
            )
        workers = self._train.get_context().get_world_size()
        if workers > 1 and get_agreement().is_alone:
            raise ValueError(
                f"un.ray.Backup runs in one of {workers} workers, whose strategy knows this process alone: each would train the whole model by "
                f"itself, and save it. Start the function by un.ray.Trainer, and make the model in the scope of a "
                f"un.MultiWorkerMirroredStrategy."
            )
        Backup._has_begun = True
        self._store = RayStore(self._train)
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._logs = logs or {}
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._logs = logs or {}
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._saved_place != self._place:
            self._save()
        super().on_train_end(logs)

    # Called by the base class.

    @contextlib.contextmanager
    def _listen(self) -> Iterator[StopRequest]:
        get_agreement().begin_anew()
        yield Preemption(self._train)

    def _save(self) -> None:
        with get_activity().report_busy("waiting for Ray's storage"):
            self._is_uploaded.wait()  # else checkpoints that come faster than Ray takes them would fill the local disk
        super()._save()
        self._store.settle(GOES_ON)
        number = self._number - 1
        self._report(self._store.path(number) if number in self._store.numbers else None)

    def _report(self, path: Place | None) -> None:
        """Report the metrics, and the checkpoint if this process has written one. All workers do so together."""
        epoch, step = self._place
        metrics = {"epoch": epoch, "step": step} | {name: np.asarray(value).tolist() for name, value in self._logs.items()}
        if path is not None:
            self._is_uploaded.clear()
        with get_activity().report_waiting("that Ray takes a checkpoint"):
            self._train.report(
                metrics,
                path and self._train.Checkpoint.from_directory(os.fspath(path)),
                checkpoint_upload_mode=self._train.CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=self._upload,
                delete_local_checkpoint_after_upload=False,
            )

    def _upload(self, checkpoint: Any, name: str) -> Any:
        """Move a checkpoint into Ray's storage. Ray calls this in a thread of its own."""
        there = self._train.get_context().get_storage()
        local = find_place(checkpoint.path)
        try:
            uploaded = there.persist_current_checkpoint(checkpoint, name)
            local.remove_folder()
            local.parent.remove_if_empty()
            return uploaded
        except Exception as error:
            raise OSError(
                f"The checkpoint {name} was not written to {there.experiment_fs_path}. It lies in {os.fspath(local)} on this machine, and those "
                f"before it are as they were. Write RunConfig(storage_path=...) with a folder or an address that all nodes may write to; with the "
                f"same name= there, the training goes on. The storage says: {error}"
            ) from error
        finally:
            self._is_uploaded.set()


class Preemption(StopRequest):
    """A node that Ray will take away, in place of a signal. The training is saved, and goes on until Ray ends it."""

    def __init__(self, train: Any) -> None:
        super().__init__()
        self._train = train
        self._last_look = time.monotonic()
        self._answered: object = None

    def exit_program(self, path: object) -> None:
        """Go on: Ray ends the workers, and starts others."""

    @property
    def is_due(self) -> bool:
        """Whether a node was announced. Process 0 knows the time, and all processes ask Ray at the step at which its wish arrives."""
        agreement = get_agreement()
        is_time = agreement.is_first and time.monotonic() - self._last_look > SECONDS
        return agreement.agree_to_stop(is_time) and self.is_asked_in_any_process()

    def is_asked_in_any_process(self) -> bool:
        get_agreement().begin_anew()
        self._last_look = time.monotonic()
        with get_activity().report_waiting("whether Ray takes a node away"):
            announced = self._train.get_preemption_info()
        is_new = announced is not None and announced != self._answered
        self._answered = announced
        return is_new


class RayStore(CheckpointStore):
    """Checkpoints in a local folder, from where they are uploaded. A run has the same folder when it is started again."""

    def __init__(self, train: Any) -> None:
        super().__init__(find_local_folder(train.get_context().get_storage(), "checkpoints"))
        self._train = train

    def load_newest(self) -> LoadedCheckpoint | None:
        super().delete()  # what a worker has left that was killed here
        checkpoint = self._train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            return load_checkpoint(folder)

    def delete(self) -> None:
        """Leave the checkpoints to Ray."""
