"""What processes tell each other of a batch that one of them has read, in arrays of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unisono._src.engine.exchange.shared_memory import LINE, round_up
from unisono._src.engine.global_batch import BatchArray, Position, is_batch_array
from unisono._src.engine.observers.process_comparison import describe_position
from unisono._src.processes.agreement import AgreementError
from unisono._src.typing import Json, PyTree


class Answer(NamedTuple):
    """What a process says of a batch. Without batch and error it has none: the pass is over, or it was not asked."""

    batch: PyTree = None
    error: Exception | None = None
    facts: Json = None
    """What is compared between processes."""


def write_answer(answer: Answer) -> list[np.ndarray]:
    """Write an answer as arrays: the length of a text, the text, and the arrays of the batch, which are not copied."""
    leaves = [] if answer.batch is None else jax.tree.leaves(answer.batch, is_leaf=is_batch_array)
    header = {
        "leaves": None if answer.batch is None else list(map(describe_leaf, leaves)),
        "error": None if answer.error is None else describe_error(answer.error),
        "facts": answer.facts,
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return [np.array([len(text)]), text, *(leaf.array for leaf in leaves)]


def read_answer(message: np.ndarray, structure: jax.tree_util.PyTreeDef | None, position: Position, process: int) -> Answer:
    """Read what `write_answer` has written in another process.

    `structure` is that of all batches. A first batch with other arrays is left out: its facts say more of it.
    """
    length = int(message[:8].view(np.int64)[0])
    header = json.loads(message[LINE : LINE + length].tobytes())
    error = None if header["error"] is None else make_error(header["error"], position, process)
    if header["leaves"] is None or structure is None or structure.num_leaves != len(header["leaves"]):
        return Answer(None, error, header["facts"])
    start = LINE + round_up(length)
    leaves: list[BatchArray] = []
    for dtype, shape, sizes in header["leaves"]:
        size = jnp.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        array = message[start : start + size].view(jnp.dtype(dtype)).reshape(shape)
        leaves.append(BatchArray(array, position, None if sizes is None else tuple(sizes)))
        start += round_up(size)
    return Answer(jax.tree.unflatten(structure, leaves), error, header["facts"])


def describe_leaf(leaf: BatchArray) -> tuple[str, Sequence[int], Sequence[int] | None]:
    """Describe an array by (dtype, shape, rows of the shards). Only the names of NumPy's own dtypes say their order of bytes."""
    dtype = leaf.source.dtype
    return dtype.name if dtype.kind == "V" else dtype.str, leaf.shape, leaf.sizes


def describe_error(error: Exception) -> tuple[bool, str]:
    return isinstance(error, OSError), f"{type(error).__name__}: {error}"


def make_error(described: Sequence[Json], position: Position, process: int) -> Exception:
    """Make the error of a process that got none itself."""
    is_of_system, text = described
    return (OSError if is_of_system else AgreementError)(f"Process {process} cannot read {describe_position(position)}: {text}")
