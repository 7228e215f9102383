"""The stack of the main thread."""

from __future__ import annotations

import sys
import threading
import traceback

NOT_THE_PROGRAM = ("cluster/launch/worker.py", "<frozen runpy>")


def format_main_stack() -> str:
    """Return the stack of the main thread as a traceback shows it, from the program's first line on."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [summary for summary in traceback.extract_stack(frame) if not summary.filename.endswith(NOT_THE_PROGRAM)]
    return "".join(traceback.format_list(frames))
