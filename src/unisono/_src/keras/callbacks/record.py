"""`Record`: a fit whose steps are recorded as digests. Two runs can be compared by them."""

from __future__ import annotations

import contextlib
import os
import sys

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.fit.call_arguments import FitCallback
from unisono._src.keras.record.run_recorder import get_recorder
from unisono._src.local_paths import as_local_path


class Record(FitCallback):
    """A callback that records digests of each step.

    They are of the rows, the gradient, the weights and the optimizer's state, by variable.

    Two runs whose records are equal had the same bits in every step, and where they part the records say at which step and in which
    variable. Recording changes no bit. The digests are computed on the device and fetched late. The file only grows, and is whole up to the
    last steps when the process is killed; a run that is resumed from a checkpoint goes on with its record.

    `UNISONO_RECORD=run python train.py` records every step of a program that has no such callback, loops of the user's own included.

    Args:
        directory: A directory for the record of this run.

    Example:
        >>> callback = Record("run")
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        with PUBLIC_CALL:
            super().__init__()
            if not os.fspath(directory):
                raise ValueError("Record received an empty directory. Name a directory for the record of this run.")
            as_local_path("Record", directory)
            self.directory = os.fspath(directory)
            self._block = contextlib.ExitStack()

    def fit_begins(self) -> None:
        self._block.enter_context(get_recorder().record_into(self.directory))

    def fit_is_over(self) -> None:
        self._block.close()

    def steps_until_due(self, step: int) -> int:
        return sys.maxsize
