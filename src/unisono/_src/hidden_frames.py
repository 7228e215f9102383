"""Errors of a public call without our frames.

They show the user's frames, unless UNISONO_TRACEBACK=full. Keras and JAX hide their own frames in the same way.
"""

from __future__ import annotations

import dis
import os
import pathlib
import threading
import types
from collections.abc import Iterator

SWITCH = "UNISONO_TRACEBACK"
"""The environment variable that shows all frames if it is "full"."""

FULL = "full"
OURS = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
CALLED = ("jax", "keras", "contextlib")
"""Packages through which we call users' code and our own. Their frames are hidden there, unless the error is theirs."""

RAISES = (dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"])


class PublicCall(threading.local):
    """The context of a public call.

    Our outermost frame writes `with PUBLIC_CALL:`. It is no decorator: a wrapper would be one more frame, by which warnings would name
    another line than the caller's, and would take longer. If public calls are nested, the outermost one hides the frames: what lies between
    reads them.
    """

    depth = 0
    """The number of public calls that this thread is in."""

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: types.TracebackType | None) -> None:
        self.depth -= 1
        if self.depth or not isinstance(error, Exception) or isinstance(error, StopIteration):
            return
        if os.environ.get(SWITCH) != FULL:
            hide_frames(error)


PUBLIC_CALL = PublicCall()


def hide_frames(error: BaseException) -> None:
    """Take our frames out of an error's traceback. The errors that it came from lose them too."""
    for one in list_chain(error):
        one.__traceback__ = select_frames(one.__traceback__)


def list_chain(error: BaseException) -> list[BaseException]:
    """List an error and all errors that it came from.

    They were raised by `from`, or while another one was handled. The members of groups count too.
    """
    chain: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in chain:
            chain[id(one)] = one
            waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return list(chain.values())


def select_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Take our frames out of a traceback.

    Frames of libraries through which we have called the following frames go too. If the error comes from a library, its frames stay. The
    innermost frame stays, too, if it is ours and does not raise the error by itself: there a library that hides its own frames, or Unisono
    itself, has failed.
    """
    entries = list(walk_entries(frames))
    kept: types.TracebackType | None = None
    for entry in select_entries(entries):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def select_entries(entries: list[types.TracebackType]) -> list[types.TracebackType]:
    """Select the entries that stay, the innermost first."""
    kinds: list[str] = []
    for entry in entries:
        is_ours = entry.tb_frame.f_code.co_filename.startswith(OURS)
        package = str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        is_called = package in CALLED and kinds[-1:] not in ([], ["users"])
        kinds.append("ours" if is_ours else "called" if is_called else "users")
    if kinds[-1:] == ["ours"] and not is_raised_in(entries[-1]):
        kinds[-1] = "users"
    innermost = len(kinds)
    while innermost and kinds[innermost - 1] == "called":
        innermost -= 1
    return [
        entry
        for number, (entry, kind) in reversed(list(enumerate(zip(entries, kinds, strict=True))))
        if kind == "users" or number >= innermost
    ]


def walk_entries(frames: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def is_raised_in(entry: types.TracebackType) -> bool:
    """Whether the instruction of this frame is `raise`."""
    return entry.tb_frame.f_code.co_code[entry.tb_lasti] in RAISES
