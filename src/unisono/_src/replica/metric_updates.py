"""The updates of a user's metrics: the arrays that a step feeds them with, recorded to be fed again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import jax
import keras
import numpy as np

from unisono._src.keras_private.instances import wrap_method
from unisono._src.typing import AnyArray, Arguments, Keywords, PyTree, UserFunction

FedArrays: TypeAlias = Sequence[AnyArray | None]
"""The leaves of a call's arguments that are arrays; None for other leaves."""

ArgumentFiller: TypeAlias = Callable[[FedArrays], tuple[Arguments, Keywords]]
"""Returns the (args, kwargs) of a call with other arrays in the places of the call's own arrays."""


class MetricUpdate(NamedTuple):
    """One call of a metric's `update_state`."""

    metric: keras.metrics.Metric
    arrays: FedArrays
    fill_arguments: ArgumentFiller

    def has_rows(self, rows: int, on_both: MetricUpdate | None) -> bool:
        """Return whether an array has a value for each row. One number for all rows tells nothing about parts of them.

        `on_both` is the call on twice the rows, where it is known: an array that is as long there has values of something else.
        """
        arrays_on_both = self.arrays if on_both is None else on_both.arrays
        size = rows if on_both is None else 2 * rows
        pairs = zip(self.arrays, arrays_on_both, strict=True)
        return any(is_of_rows(array, rows) and is_of_rows(more, size) for array, more in pairs)

    def change_rows(self, rows: int, change: Callable[[AnyArray], AnyArray]) -> MetricUpdate:
        """Return the call with each array changed that has a value for each row."""
        return self._replace(arrays=[change(array) if is_of_rows(array, rows) else array for array in self.arrays])


class UpdatesOnOtherRows(NamedTuple):
    """The updates of metrics by a step on as many other rows."""

    updates: Sequence[MetricUpdate]
    on_both: Sequence[MetricUpdate]
    """The updates on the rows and the other rows together."""


def pair_with_both(
    updates: Sequence[MetricUpdate], other: UpdatesOnOtherRows | None
) -> list[tuple[MetricUpdate, MetricUpdate | None]]:
    """Return each update with the same call on both halves of the rows; None where the code makes other calls there, or was not run."""
    on_both = other.on_both if other is not None else ()
    alike = [len(update.arrays) for update in updates] == [len(update.arrays) for update in on_both]
    return list(zip(updates, on_both if alike else [None] * len(updates), strict=True))


def is_of_rows(array: AnyArray | None, rows: int) -> TypeGuard[AnyArray]:
    """Return whether the array has a value for each row."""
    return array is not None and bool(np.ndim(array)) and len(array) == rows


def is_fed_array(leaf: object) -> TypeGuard[AnyArray]:
    """Return whether an argument of a metric is an array, or is used like one."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | keras.Variable)


@contextlib.contextmanager
def note_updates(
    metrics: Iterable[keras.metrics.Metric],
    note: Callable[[str, list[AnyArray | None], tuple[keras.metrics.Metric, ArgumentFiller]], object],
) -> Generator[None]:
    """Call `note("update", arrays, (metric, fill_arguments))` for each update of these metrics in the block."""

    def wrap_update(metric: keras.metrics.Metric, update_state: UserFunction) -> UserFunction:
        def update(*args: PyTree, **kwargs: PyTree) -> object:
            leaves, structure = jax.tree.flatten((args, kwargs))

            def fill_arguments(arrays: FedArrays) -> tuple[Arguments, Keywords]:
                filled = [leaf if array is None else array for array, leaf in zip(arrays, leaves, strict=True)]
                return jax.tree.unflatten(structure, filled)

            note("update", [leaf if is_fed_array(leaf) else None for leaf in leaves], (metric, fill_arguments))
            return update_state(*args, **kwargs)

        return update

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(wrap_method(metric, "update_state", functools.partial(wrap_update, metric)))
        yield
