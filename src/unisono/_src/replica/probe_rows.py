"""Rows and weights to probe on: those of replicas, and made-up ones.

The first batch of a training may tell nothing: all zero, all alike, nothing masked, every weight one. A sum over rows is a sum whatever the rows
hold, and so is a mean. So rows may be made up, as long as the code accepts them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._src.keras_private.data_adapters import unpack_batch
from unisono._src.replica import random_keys
from unisono._src.replica.drawn_values import draw_values_like
from unisono._src.replica.marks import mark_rows
from unisono._src.replica.protocol import State
from unisono._src.typed_jax import map_tree
from unisono._src.typing import AnyArray, Array, PyTree, UserBatch

MOST_PAIRS = 16
"""The largest number of pairs of replicas' rows that one probe measures."""


class RowPair(NamedTuple):
    """Two batches to measure together: as many rows as one replica has, and as many others."""

    state: State
    one: PyTree
    other: PyTree

    @classmethod
    def of(cls, state: State, both: PyTree) -> RowPair:
        """Return the two halves of some rows as a pair."""
        half = len(jax.tree.leaves(both)[0]) // 2
        return cls(state, slice_rows(both, range(half)), slice_rows(both, range(half, 2 * half)))

    @property
    def both(self) -> PyTree:
        return map_tree(lambda one, other: np.concatenate([one, other]), self.one, self.other)

    @property
    def batches(self) -> list[tuple[PyTree, int]]:
        """Return the batches to run on, each with its rows over those of one part."""
        return [(self.one, 1), (self.other, 1), (self.both, 2)]


def pair_shards(state: State, batch: PyTree, shards: Sequence[range], first: int = 0, most: int = MOST_PAIRS) -> list[RowPair]:
    """Return pairs of the shards of neighbouring replicas, from pair number `first` on. Shards of another size than the first are left out.
    One replica alone is paired with itself."""
    alike = [shard for shard in shards if len(shard) == len(shards[0])]
    pairs = list(zip(alike[::2], alike[1::2], strict=False)) or [(alike[0], alike[0])]
    chosen = [pairs[(first + number) % len(pairs)] for number in range(min(most, len(pairs)))]
    return [RowPair(state, slice_rows(batch, one), slice_rows(batch, other)) for one, other in chosen]


def slice_rows(batch: PyTree, rows: range) -> PyTree:
    return map_tree(operator.itemgetter(slice(rows.start, rows.stop)), batch)


def repeat_rows(batch: PyTree, times: int) -> PyTree:
    """Return the rows of a batch on the host, `times` times one after another."""

    def repeat(array: AnyArray) -> np.ndarray:
        return np.concatenate([array] * times)

    return map_tree(repeat, batch)


def make_up_rows(batch: UserBatch, compared: Mapping[int, set[float]]) -> list[UserBatch]:
    """Return made-up batches with as many rows as `batch`, to measure on as well.

    `compared` holds the numbers that code compares the arrays of the batch with, by the arrays' positions among its leaves.
    """
    rng = np.random.default_rng(0)
    arrays, structure = jax.tree.flatten(batch)
    leaves = [np.asarray(array) for array in arrays]
    drawn = [draw_values_like(rng, leaf) for leaf in leaves]
    made = [drawn, *mark_rows(rng, leaves, compared), *mark_rows(rng, drawn, compared)]
    return [jax.tree.unflatten(structure, made_leaves) for made_leaves in made]


def draw_sample_weights(batch: UserBatch) -> list[tuple[PyTree, PyTree, PyTree]]:
    """Return a batch of `fit` with random sample weights, some of them zero; an empty list where the batch has no weights."""
    rng = np.random.default_rng(0)
    x, y, weights = unpack_batch(batch)

    def draw_weights(array: AnyArray) -> np.ndarray:
        shape = np.shape(array)
        return (rng.uniform(0.1, 2, shape) * (rng.random(shape) < 0.7)).astype(np.asarray(array).dtype)

    return [] if weights is None else [(x, y, map_tree(draw_weights, weights))]


def perturb_weights(state: State) -> State:
    """Return the state with weights and other numbers that a model does not begin with: none of them is zero."""
    rng = np.random.default_rng(0)

    def add_noise(value: Array, is_weight: bool) -> Array:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        noise = rng.normal(0, 0.1, value.shape)
        return value + jnp.asarray(noise if is_weight else np.abs(noise), value.dtype)

    weights, non_trainable, *rest = state
    return [add_noise(value, True) for value in weights], [add_noise(value, False) for value in non_trainable], *rest


def change_seeds(state: State, variables: Sequence[keras.Variable]) -> State:
    """Return the state with other seeds. `variables` are the non-trainable variables."""
    weights, non_trainable, *rest = state
    pairs = zip(variables, non_trainable, strict=True)
    return weights, [value + 1 if random_keys.is_seed_state(variable) else value for variable, value in pairs], *rest
