"""The state of a user function between two runs.

Its step has made the arrays, and Keras' variables hold them meanwhile.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import keras
from jax import Array

from unisono._src.engine.state import State
from unisono._src.keras.private.trainer_state import get_raw_values, set_raw_values


class LentState:
    """The variables of a function, which borrow arrays from its step.

    A step writes the new state into the memory of the old one, so it must be the only owner of an array. It is the only owner of an
    array that it has made, until the array is handed out. Then the variable holds the array too, and so does whoever has read the variable and
    kept what it read. References are counted before an array is handed out and when it comes back: if there is one more, the variable's,
    nobody else holds it. Where Python counts in another way, the counts differ, and the array is copied.

    A second array object of the same memory for the variable would tell the same without counts. It was tried: for the twenty variables of
    a small net, a step took a sixth longer.
    """

    def __init__(self, groups: Sequence[Sequence[keras.Variable]]) -> None:
        self.variables = list(itertools.chain.from_iterable(groups))
        self._sizes = list(map(len, groups))
        self._lent: list[Array] = []
        self._counts: list[int] = []

    def take_back(self) -> State:
        """Take back the variables' values, in arrays that the step owns.

        A value that comes from elsewhere, as from an initializer or an assignment, is copied: the step does not know who owns it. The copy
        goes into the variable at once, so that there are never two of all.
        """
        arrays = []
        counts = count_references(self._lent)
        raw = get_raw_values(self.variables)
        for variable, array, lent, before, now in itertools.zip_longest(self.variables, raw, self._lent, self._counts, counts):
            if array is not lent:
                array = array.copy()
                set_raw_values([variable], [array])
            elif now != before + 1:
                array = array.copy()
            arrays.append(array)
        values = iter(arrays)
        return tuple([list(itertools.islice(values, size)) for size in self._sizes])

    def lend(self, state: State, is_whole: bool) -> None:
        """Put the newest state of the step into the variables. There may be none.

        `is_whole`: no error is on its way. The frames of an error may hold the arrays for a while, and would be counted.
        """
        arrays = list(itertools.chain.from_iterable(state))
        self._lent = arrays if is_whole else []
        self._counts = count_references(self._lent)
        if arrays:
            set_raw_values(self.variables, arrays)


def count_references(arrays: list[Array]) -> list[int]:
    return list(map(sys.getrefcount, arrays))
