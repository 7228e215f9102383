"""What hangs on fit."""

from unisono.callbacks.backup import BackupAndRestore
from unisono.callbacks.tensorboard import TensorBoard

__all__ = ["BackupAndRestore", "TensorBoard"]
