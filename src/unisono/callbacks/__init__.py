"""Callbacks for fit: BackupAndRestore and TensorBoard. The modules beside them are internal."""

from unisono.callbacks.backup import BackupAndRestore
from unisono.callbacks.tensorboard import TensorBoard

__all__ = ["BackupAndRestore", "TensorBoard"]


def __dir__() -> list[str]:
    return sorted(__all__)
