"""A script run under a trace function, and the file that says what it did."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
import types
from typing import TYPE_CHECKING

from .line_trace import FrameTrace, LineNotes
from .user_lines import is_of_user

if TYPE_CHECKING:
    from unisono._src.audit.script_trace.training_notes import TrainingNotes
    from unisono._src.typing import UserObject

NOT_TRAINED = {"variables": [], "calls": {}, "programs": [], "layers": [], "rows": []}
"""The notes of a training, of a script that imports no Unisono."""


class ScriptTrace:
    """The notes of one process, which are written into a directory when it ends."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lines = LineNotes()
        self._training: TrainingNotes | None = None
        self._has_hooks = False

    def trace_call(self, frame: types.FrameType, event: str, argument: UserObject) -> FrameTrace | None:
        """Return the trace of a call that begins, where the function is the user's."""
        if not self._has_hooks and hasattr(sys.modules.get("unisono"), "MirroredStrategy"):
            self._has_hooks = True  # before another thread comes here while this one imports
            from unisono._src.audit.script_trace.training_hooks import add_hooks

            self._training = add_hooks()
        return FrameTrace(self._lines, frame) if is_of_user(frame.f_code.co_filename) else None

    def write(self) -> None:
        """Write the notes, and the weights as the last step has left them."""
        process = os.environ.get("UNISONO_PROCESS", "0")
        training = NOT_TRAINED if self._training is None else self._training.convert_to_json()
        if self._training is not None:
            self._training.write_weights(os.path.join(self._directory, f"weights-{process}.npz"))
        with open(os.path.join(self._directory, f"trace-{process}.json"), "w", encoding="utf-8") as file:
            json.dump({"lines": self._lines.convert_to_json(), **training}, file)


def run_script(directory: str, words: list[str]) -> None:
    """Run a script, or -m and a module, with its arguments, as Python itself does, and write what it did into a directory."""
    is_module = words[0] == "-m"
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    sys.argv = words[1:] if is_module else words
    trace = ScriptTrace(directory)
    atexit.register(trace.write)
    threading.settrace(trace.trace_call)
    sys.settrace(trace.trace_call)
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.settrace(None)
