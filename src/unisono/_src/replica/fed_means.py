"""Means that replica code feeds with a number for all rows: is it the mean of the rows, or their sum?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from unisono._src.replica.growth import MEAN, SUM
from unisono._src.replica.metric_probe import CLOSE
from unisono._src.replica.metric_updates import MetricUpdate, UpdatesOnOtherRows, pair_with_both
from unisono._src.typing import AnyArray


def find_batch_level_means(
    updates: Sequence[MetricUpdate],
    rows: int,
    other: UpdatesOnOtherRows | None,
    known: Mapping[int, bool],
    by_hand: bool,
) -> tuple[dict[int, bool], bool]:
    """Return, for the ids of variables of means without weights, whether the means are fed with what is of a whole batch, and whether these
    rows tell means from sums.

    Code computes the mean of a replica's rows in many ways, so a number is taken for that mean, and so are numbers that are as many for any
    number of rows. What grows with the rows, as two values for each row, is added up, and so are sums over the rows: their mean over batches
    has the total of all replicas, and counts each batch once. `known` is what was found before. `by_hand`: the code may make a mean of a sum
    by a constant, the rows of a replica or R. Then a sum is taken for a mean too.
    """
    means: dict[int, bool] = {}
    are_telling = True
    on_other = other.updates if other is not None else [None] * len(updates)
    for (update, on_both), more in zip(pair_with_both(updates, other), on_other, strict=False):
        if type(update.metric) is keras.metrics.Mean and len(update.arrays) == 1:
            total = update.metric.total
            count = update.metric.count
            is_of_batch = is_of_whole_batch(update.arrays[0], on_both and on_both.arrays[0], rows)
            growth = on_both and more and compute_sum_growth(update.arrays[0], more.arrays[0], on_both.arrays[0])
            are_telling &= by_hand or growth is not None or other is None or update.arrays[0] is None
            was_sum = known.get(id(count), False) and not known.get(id(total), True)
            is_sum = not by_hand and (was_sum if growth is None else growth == SUM)
            means[id(total)] = (is_of_batch and not is_sum) or means.get(id(total), False)
            means[id(count)] = is_of_batch or means.get(id(count), False)
    return means, are_telling


def compute_sum_growth(one: AnyArray | None, other: AnyArray | None, both: AnyArray | None) -> int | None:
    """Return SUM where a number for all rows is the sum of the numbers for two halves, else MEAN; None where a half is zero or no array.

    Of a mean over rows that are not masked, a half that is masked gives zero, and the other half looks like a part of a sum.
    """
    if one is None or other is None or both is None or not np.shape(one) == np.shape(other) == np.shape(both):
        return None
    halves = np.asarray([one, other], "float64")
    whole = np.asarray(both, "float64")
    if not (np.all(halves) and np.all(np.isfinite(halves))):
        return None
    return SUM if np.all(np.abs(halves.sum(0) - whole) <= CLOSE * np.abs(halves).sum(0)) else MEAN


def is_of_whole_batch(array: AnyArray | None, on_both: AnyArray | None, rows: int) -> bool:
    """Return whether an array is as long for any number of rows. `on_both` is the array on twice the rows; None where it is not known."""
    if array is None:  # a number of Python
        return True
    if on_both is not None:
        return np.shape(on_both) == np.shape(array)
    return not np.ndim(array) or (len(array) != rows and (rows == 1 or len(array) % rows > 0))
