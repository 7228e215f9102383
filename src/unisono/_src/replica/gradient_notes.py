"""Notes that cross the border of a gradient's trace.

Replica code notes arrays while it is differentiated. These arrays of the inner trace are handed out of it.
"""

from __future__ import annotations

from unisono._src.replica.trace_recorder import NotedArrays, ReplicaCode
from unisono._src.typing import Array, PyTree


class GradientNotes:
    """The notes of the code since this object was made. Outside of replica code nothing is noted.

    What is noted in the trace of a gradient is handed out of it: outside, the same values are other arrays.
    """

    def __init__(self, code: ReplicaCode | None) -> None:
        self._noted: list[NotedArrays] = [] if code is None else code.noted
        self._masks: list[Array] = [] if code is None else code.masks
        self._divisors: list[float | Array] = [] if code is None else code.divisors
        self._fixed_divisors: list[tuple[float, int]] = [] if code is None else code.fixed_divisors
        self._known_notes = len(self._noted)
        self._known_masks = len(self._masks)
        self._known_divisors = len(self._divisors)
        self._known_fixed_divisors = len(self._fixed_divisors)

    @property
    def masks(self) -> list[Array]:
        return self._masks[self._known_masks :]

    @property
    def has_divided(self) -> bool:
        """Whether the code has divided a loss for the global batch."""
        return len(self._divisors) > self._known_divisors or len(self._fixed_divisors) > self._known_fixed_divisors

    def get_arrays(self) -> PyTree:
        """The arrays of the notes."""
        return [note.arrays for note in self._noted[self._known_notes :]], self._divisors[self._known_divisors :]

    def set_arrays(self, arrays: PyTree) -> None:
        """Replace the arrays that `get_arrays` returned."""
        of_notes, self._divisors[self._known_divisors :] = arrays
        notes = self._noted[self._known_notes :]
        self._noted[self._known_notes :] = [note._replace(arrays=new) for note, new in zip(notes, of_notes, strict=True)]
