"""The trace of the user's lines: of each, digests of the values that it assigns or returns."""

from __future__ import annotations

import collections
import types
from typing import TYPE_CHECKING

from .user_lines import Place, is_of_user, read_frame_place
from .value_digest import digest_value

if TYPE_CHECKING:
    from unisono._src.typing import Json, UserObject

MOST_TIMES = 60
"""The number of times that the values of one line are noted."""

RETURNED = "return"
"""The name under which a value is noted that a function returns to a function of the user's."""

HANDED = "handed"
"""The name under which a value is noted that a function returns to a library."""


class LineNotes:
    """The lines that have run, with digests of the values by name. Moments count what was noted, from 0 on."""

    def __init__(self) -> None:
        self._moment = 0
        self._begins: dict[Place, int] = {}
        """The moment at which each line came first."""
        self._values: dict[Place, dict[str, list[tuple[int, str]]]] = {}
        self._times: collections.Counter[Place] = collections.Counter()

    def note_line(self, place: Place, changed: dict[str, str]) -> None:
        """Note that a line has run, and the digests of the names that have other values since."""
        self._begins.setdefault(place, self._moment)
        values = self._values.setdefault(place, {})
        self._times[place] += 1
        if self._times[place] <= MOST_TIMES:
            for name, digest in changed.items():
                values.setdefault(name, []).append((self._moment, digest))
        self._moment += 1

    def convert_to_json(self) -> Json:
        return [
            {"place": place, "begin": begin, "times": self._times[place], "values": self._values[place]}
            for place, begin in self._begins.items()
        ]


class FrameTrace:
    """The trace function of one call of a function of the user's."""

    def __init__(self, notes: LineNotes, frame: types.FrameType) -> None:
        self._notes = notes
        self._place = read_frame_place(frame)
        self._returned = RETURNED if frame.f_back is not None and is_of_user(frame.f_back.f_code.co_filename) else HANDED
        self._before = digest_names(frame)
        arguments = {name: digest for name, digest in self._before.items() if not name.startswith("self.")}
        notes.note_line(self._place, arguments)

    def __call__(self, frame: types.FrameType, event: str, argument: UserObject) -> FrameTrace:
        if event in ("line", "return"):
            digests = digest_names(frame)
            changed = {name: digest for name, digest in digests.items() if self._before.get(name) != digest}
            if event == "return" and argument is not None:
                changed[self._returned] = digest_value(argument)
            self._notes.note_line(self._place, changed)
            self._before = digests
            self._place = read_frame_place(frame)
        return self


def digest_names(frame: types.FrameType) -> dict[str, str]:
    """Return digests of the names that a frame may assign, and of the attributes of `self`."""
    digests = {name: digest_value(value) for name, value in frame.f_locals.items() if not name.startswith("__")}
    if frame.f_code.co_name != "<module>" and "self" in frame.f_locals:
        del digests["self"]
        attributes = getattr(frame.f_locals["self"], "__dict__", {})
        digests |= {f"self.{name}": digest_value(value, 1) for name, value in attributes.items() if is_data(name, value)}
    return digests


def is_data(name: str, value: object) -> bool:
    """Return whether an attribute is neither private nor a method, which a library may have put there."""
    return not name.startswith("_") and not callable(value)
