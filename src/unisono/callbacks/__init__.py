"""What hangs on fit."""

from unisono.callbacks.backup import BackupAndRestore

__all__ = ["BackupAndRestore"]
