"""Losses that look at the whole batch, as guides write them: of labels, or of two views that lie beside each other in a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
from keras import ops

CLASSES = 5
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def cross_entropy(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def rmse(y, logits):
    return ops.sqrt(ops.mean((logits[:, 0] - ops.cast(y, "float32")) ** 2))


def dice(y, logits):
    truth, likely = ops.one_hot(ops.cast(y, "int32"), CLASSES), ops.softmax(logits)
    return 1 - ops.mean(2 * ops.sum(likely * truth, 0) / (ops.sum(likely, 0) + ops.sum(truth, 0) + 1e-6))


def contrast(y, logits):
    z = logits / ops.norm(logits, axis=-1, keepdims=True)
    itself = ops.eye(ops.shape(z)[0])
    same = ops.cast(y[:, None] == y[None], "float32") - itself
    return -ops.sum(same * ops.log_softmax(z @ ops.transpose(z) / 0.5 - 1e9 * itself)) / ops.maximum(ops.sum(same), 1)


def masked_mean(y, logits):
    mask = ops.cast(y > 1, "float32")
    return ops.sum(cross_entropy(y, logits) * mask) / ops.sum(mask)


def barlow_twins(y, z):
    """Two halves of the features stand for two views."""
    first, second = ((v - ops.mean(v, 0)) / (ops.std(v, 0) + 1e-4) for v in (z[:, :2], z[:, 2:4]))
    correlation = ops.transpose(first) @ second / ops.cast(ops.shape(z)[0], "float32")
    return ops.sum((correlation - ops.eye(2)) ** 2)


def distances(z):
    squares = ops.sum(z * z, -1)
    return ops.sqrt(ops.maximum(squares[:, None] - 2 * z @ ops.transpose(z) + squares[None], 1e-6))


def hardest_triplets(y, z):
    labels = ops.reshape(ops.cast(y, "int32"), (-1,))
    same = ops.cast(labels[:, None] == labels[None], "float32")
    between = distances(z)
    return ops.mean(ops.relu(ops.max(between * same, 1) - ops.min(between + 1e3 * same, 1) + 1.0))


def nt_xent(first, second):
    """Each view of a row is to be told from all others of the batch by the other view."""
    z = ops.normalize(ops.concatenate([first, second]), axis=-1)
    rows = ops.shape(first)[0]
    logits = z @ ops.transpose(z) / 0.5 - 1e9 * ops.eye(2 * rows)
    others = ops.concatenate([ops.arange(rows) + rows, ops.arange(rows)])
    return ops.mean(cross_entropy(others, logits))


def pairs_of_neighbours(y, z):
    """Rows come in pairs, of which the first is to have the larger score. Three rows are no pairs."""
    scores = ops.reshape(z[:, 0], (-1, 2))
    return ops.mean(ops.softplus(scores[:, 1] - scores[:, 0]))


def hardest_five(y, z):
    """More rows than a shard has."""
    return ops.mean(ops.top_k(cross_entropy(y, z), 5)[0])


def by_the_size_of_the_batch(y, z):
    """Another program for few rows."""
    rows = ops.shape(z)[0]
    return ops.mean(cross_entropy(y, z)) if rows > 4 else ops.sum(z)


def balanced_assignments(y, z):
    """As Sinkhorn and Knopp: soft classes of rows, of which each has as many."""
    rows = ops.shape(z)[0]

    def balance(number, shares):
        shares = shares / ops.sum(shares, 0, keepdims=True) / CLASSES
        return shares / ops.sum(shares, 1, keepdims=True) / rows

    wanted = rows * ops.fori_loop(0, 3, balance, ops.exp(ops.stop_gradient(z) / 0.5))
    return -ops.mean(ops.sum(wanted * ops.log_softmax(z / 0.3), -1))


def worst_class(y, z):
    classes = ops.cast(y, "int32")
    totals, counts = (ops.segment_sum(v, classes, CLASSES) for v in (cross_entropy(y, z), ops.ones_like(z[:, 0])))
    return ops.max(totals / ops.maximum(counts, 1))


def counts_by_rejection(y, z):
    """Draws that are repeated until all rows have one: a loop that never ends on what is no number."""
    chances = ops.sigmoid(ops.stop_gradient(z[:, :1]))
    return ops.mean(z**2 * jax.random.binomial(jax.random.key(1), 4, chances))


def turned(y, z):
    """Complex numbers, one of which is a mean over the batch."""
    numbers = jax.lax.complex(z, ops.roll(z, 1, 1))
    return ops.mean(ops.abs(numbers) ** 2) + jnp.abs(jnp.mean(numbers))
