"""Callbacks for fit: BackupAndRestore, Record and TensorBoard. The modules beside them are internal."""

from unisono._src.keras.callbacks.backup import BackupAndRestore
from unisono._src.keras.callbacks.record import Record
from unisono._src.tools.tensorboard.callback import TensorBoard

__all__ = ["BackupAndRestore", "Record", "TensorBoard"]


def __dir__() -> list[str]:
    return sorted(__all__)
