"""The integer labels that classification losses get.

A trace shows which array of a batch they are, and how many classes there are. Keras on JAX makes the loss of a label out of range
0, without a word: its one-hot vector is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from unisono._src.keras.private.compiled_losses import find_class_options
from unisono._src.keras.private.masks import get_keras_mask
from unisono._src.typing import Array, PyTree


class LabelRange(NamedTuple):
    """The range of the labels in one array of a batch."""

    loss: str
    labels: int
    """The position of the array among the leaves of the batch."""
    weights: int | None
    """The position of the labels' weights. Labels whose weight is 0 may have any value."""
    classes: int
    ignored: int | None
    """A label that stands for none."""


class LabelRanges:
    """The label ranges of one model's losses, as traces show them."""

    def __init__(self) -> None:
        self.found: dict[LabelRange, None] = {}
        self._varying: set[LabelRange] = set()
        """Ranges whose number of classes depends on the rows, as where each row of a table of pairs chooses another row. It is left out of them."""

    def note(self, batch: PyTree, loss: object, y_true: PyTree, y_pred: PyTree, sample_weight: Array | None) -> None:
        """Note a call of a loss whose labels lie in the batch. Predictions with a mask may have any label where it masks."""
        options = find_class_options(loss)
        if options is None or not isinstance(y_pred, jax.Array) or get_keras_mask(y_pred) is not None:
            return
        leaves = jax.tree.leaves(batch)
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        labels, weights = places.get(id(y_true)), places.get(id(sample_weight))
        if (
            labels is None
            or (sample_weight is not None and weights is None)
            or not jnp.issubdtype(leaves[labels].dtype, jnp.integer)
        ):
            return
        classes = y_pred.shape[options.axis]
        noted = LabelRange(find_loss_name(loss), labels, weights, 0, options.ignored)
        others = [each for each in self.found if each._replace(classes=0) == noted and each.classes != classes]
        if others or noted in self._varying:
            self._varying.add(noted)
            self.found = {each: None for each in self.found if each not in others}
        else:
            self.found[noted._replace(classes=classes)] = None


def find_loss_name(loss: object) -> str:
    return getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
