"""The user's lines: which files are the user's, and which of their lines are running."""

from __future__ import annotations

import functools
import os
import pathlib
import sysconfig
import types

UNISONO = pathlib.Path(__file__).resolve().parents[3]
INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
OF_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""In the paths of packages, those of another environment below this one too."""
NOT_OF_USERS = tuple(os.path.realpath(folder) + os.sep for folder in (UNISONO, *INSTALLED))

Place = tuple[str, int, str]
"""(file, line, function)"""


@functools.cache
def is_of_user(file: str) -> bool:
    """Return whether a file is the user's: not Python's, not of an installed package, not of Unisono."""
    path = os.path.realpath(file)
    return not file.startswith("<") and not path.startswith(NOT_OF_USERS) and not any(name in path for name in OF_PACKAGES)


def read_frame_place(frame: types.FrameType) -> Place:
    """Return the line that a frame is on."""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname


def list_user_places(frame: types.FrameType | None) -> list[Place]:
    """Return the user's lines that are running, the innermost first."""
    places: list[Place] = []
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            places.append(read_frame_place(frame))
        frame = frame.f_back
    return places
