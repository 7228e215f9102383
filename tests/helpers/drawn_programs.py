"""Programs that hypothesis draws: from a value of each row, by reductions, sorts, pairs, masks, segments and quantiles, to a number of the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

WIDTH, CLASSES = 3, 4


def of_batch(name):
    """From values of rows to one number of the whole batch."""
    return {
        "mean": jnp.mean,
        "sum": lambda v: 0.1 * jnp.sum(v),
        "root": lambda v: jnp.sqrt(jnp.mean(v**2) + 0.1),
        "largest": jnp.max,
        "spread": lambda v: jnp.std(v) + jnp.ptp(v),
        "sharp": lambda v: jax.scipy.special.logsumexp(3 * v) / 3,
        "quantile": lambda v: jnp.quantile(v, 0.3),
        "hardest": lambda v: jnp.mean(jnp.sort(v)[v.shape[0] // 2 :]),
        "first": lambda v: v[0] * v[-1],
    }[name]


def of_rows(name, labels, mask):
    """From values of rows to values of rows, which may read all others."""
    shared = jax.nn.one_hot(labels, CLASSES)
    return {
        "itself": lambda v: jnp.tanh(v),
        "centred": lambda v: v - jnp.mean(v),
        "ranked": lambda v: v * jnp.argsort(jnp.argsort(v)) / v.shape[0],
        "running": lambda v: jnp.cumsum(v) / v.shape[0],
        "of its segment": lambda v: shared @ ((v @ shared) / (1 + jnp.sum(shared, 0))),
        "pairs": lambda v: jnp.mean(jnp.exp(-((v[:, None] - v[None]) ** 2)), 1),
        "masked": lambda v: jnp.where(mask, v, 0) / jnp.mean(mask.astype(v.dtype)),
        "scattered": lambda v: jnp.zeros(CLASSES).at[labels].add(v)[labels],
        "turned": lambda v: v + v[::-1],
        "twice": lambda v: jnp.sum(jnp.concatenate([v, 2 * v]).reshape(2, -1), 0),
        "drawn": lambda v: v * jax.random.bernoulli(jax.random.key(3), 0.5, v.shape),
        "numbered": lambda v: v * jnp.arange(v.shape[0]),
        "scanned": lambda v: jax.lax.scan(lambda c, w: (c + jnp.mean(v * w), c * v + w), 0.5, jnp.arange(3.0))[1][-1],
    }[name]


ROWS_TO_ROWS = st.sampled_from(
    [
        "itself",
        "centred",
        "ranked",
        "running",
        "of its segment",
        "pairs",
        "masked",
        "scattered",
        "turned",
        "twice",
        "drawn",
        "numbered",
        "scanned",
    ]
)
ROWS_TO_NUMBER = st.sampled_from(["mean", "sum", "root", "largest", "spread", "sharp", "quantile", "hardest", "first"])
NUMBERS = st.tuples(st.lists(ROWS_TO_ROWS, max_size=3), ROWS_TO_NUMBER)
LOSSES = st.lists(NUMBERS, min_size=1, max_size=2)


def compute_number(values, labels, mask, program):
    """A number of the batch: what a chain of functions of rows, and one of the batch, make of the values."""
    chain, number = program
    for name in chain:
        values = of_rows(name, labels, mask)(values)
    return of_batch(number)(values)


def compute_loss(values, labels, mask, losses):
    return jnp.sin(sum(compute_number(values, labels, mask, program) for program in losses))
