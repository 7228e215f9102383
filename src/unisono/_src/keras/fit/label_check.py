"""Check the labels of a batch on the host.

Each label that counts must be one of the classes, as TensorFlow on CPU demands.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.keras.steps.label_ranges import LabelRange


def check_labels(ranges: Iterable[LabelRange], batch: GlobalBatch) -> None:
    """Refuse labels that are no class of the model's output.

    Labels that are ignored, or have the weight 0, may have any value.
    """
    for given in ranges:
        labels = batch.leaves[given.labels].array
        if not are_in_range(labels, given.classes):
            weights = None if given.weights is None else batch.leaves[given.weights].array
            wrong = find_wrong_labels(labels, given, weights)
            if wrong.any():
                refuse_label(batch, given, tuple(np.argwhere(wrong)[0]), int(wrong.sum()))


def are_in_range(labels: np.ndarray, classes: int) -> bool:
    """Whether all labels are from 0 to classes - 1. One pass is enough: as unsigned numbers, negative ones are the largest.

    >>> are_in_range(np.array([0, 2]), 3), are_in_range(np.array([0, 3]), 3), are_in_range(np.array([-1]), 3)
    (True, False, False)
    """
    unsigned = labels.view(labels.dtype.str.replace("i", "u"))
    return not labels.size or int(unsigned.max()) < classes


def find_wrong_labels(labels: np.ndarray, given: LabelRange, weights: np.ndarray | None) -> np.ndarray:
    """Find where labels that count are out of range."""
    wrong = (labels < 0) | (labels >= given.classes)
    if given.ignored is not None:
        wrong &= labels != given.ignored
    if weights is not None:
        while weights.ndim > labels.ndim and weights.shape[-1] == 1:
            weights = weights[..., 0]
        counted = weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim)) != 0
        wrong &= counted
    return wrong


def refuse_label(batch: GlobalBatch, given: LabelRange, index: tuple[int, ...], count: int) -> None:
    """Raise the error about a batch's first wrong label."""
    leaf = batch.leaves[given.labels]
    label = int(leaf.array[index])
    row = int(index[0])
    place = f"row {row}" if leaf.position is None else f"row {row} of batch {leaf.position[1]}"
    if leaf.chosen is not None:
        place += f", which is row {int(leaf.chosen[row])} of the data,"
    others = f", and {count - 1} more of this batch are out of range too" if count > 1 else ""
    raise ValueError(
        f"The label of {place} is {label}, and the output has {given.classes} classes, whose labels are 0 to {given.classes - 1}{others}. The loss "
        f"{given.loss!r} would be 0 there. Correct the labels, or give the output more classes; labels that are not to count have the "
        f"sample_weight 0, or write keras.losses.SparseCategoricalCrossentropy(ignore_class={label})."
    )
