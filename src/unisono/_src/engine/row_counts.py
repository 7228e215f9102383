"""The rows of a batch's arrays. If several replicas share the batch, all arrays have the same number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from unisono._src.typing import PyTree, Shape

UNBATCHED = "If each item of the dataset is one row, its batches are missing: write dataset.batch(n)."

WHOLE = "With replicas=1 such a batch is taken whole."


def count_batch_rows(batch: PyTree) -> int:
    """Count the rows of a batch that has been checked."""
    return jax.tree.leaves(batch)[0].shape[0]


def are_uneven(shapes: Sequence[Shape]) -> bool:
    """Whether arrays of a batch differ in rows, or have none."""
    return len({shape[:1] for shape in shapes}) > 1 or () in shapes


def check_row_counts(shapes: Sequence[Shape], position: tuple[int, int] | None) -> int:
    """Check that all arrays of a batch have the same rows. The result is their number.

    `position` is (pass, batch in the pass).
    """
    where = "A batch" if position is None else f"Batch {position[1]}"
    counts = {shape[0] if shape else None for shape in shapes}
    if not shapes:
        raise ValueError(f"{where} holds no array; every batch needs arrays with a first axis of rows.")
    if None in counts:
        raise ValueError(
            f"{where} holds a scalar; every array needs a first axis of rows. {UNBATCHED} A weight for all rows is "
            f"np.full(rows, weight). In a loop, a number for the whole batch is an argument of its own: "
            f"strategy.run(step, args=(batch, number)). {WHOLE}"
        )
    if len(counts) > 1:
        numbers = [shape[0] for shape in shapes]
        raise ValueError(
            f"{where} holds arrays of {' and '.join(map(str, numbers))} rows; x, y and sample weights need the same number. "
            f"{advise_same_rows(min(numbers), max(numbers))} {WHOLE}"
        )
    (rows,) = counts
    if not rows:
        raise ValueError(f"{where} has no rows. Leave empty batches out of the dataset.")
    return rows


def advise_same_rows(least: int, most: int) -> str:
    """Advise how to give all arrays of a batch the same rows."""
    if least < 2:
        return UNBATCHED
    if most % least:
        return f"{UNBATCHED} If several rows of one array belong to a row of another, as nodes to a graph, pad them: one row for each graph."
    return f"If {most // least} rows of one array belong to each row of another, make one row of them: reshape(({least}, {most // least}, ...))."


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """A batch as one row. Each of its arrays has an axis of length 1 in front."""

    batch: PyTree


def unwrap_batch(batch: PyTree) -> PyTree:
    """Take the axis of one row off a whole batch. Any other batch stays as it is."""
    return jax.tree.map(lambda array: array[0], batch.batch) if isinstance(batch, WholeBatch) else batch
