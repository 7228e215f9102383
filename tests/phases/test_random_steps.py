"""Steps that hypothesis draws: reductions, sorts, pairs, masks, segments and quantiles of rows, composed, with one to three updates.

In float64, so that a difference from the whole batch is a wrong number and no rounding; and not compiled, since XLA may compute a maximum
and what is compared with it in two ways, of which plain JAX knows nothing either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sizes import cases
from whole_batch_of_phases import compare

WIDTH, CLASSES = 3, 4
CLOSE = 1e-10


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
LOSSES = st.lists(st.tuples(st.lists(ROWS_TO_ROWS, max_size=3), ROWS_TO_NUMBER), min_size=1, max_size=2)
SHARDS = (
    st.lists(st.integers(2, 3), min_size=2, max_size=4)
    .map(lambda sizes: sorted(sizes, reverse=True))
    .filter(lambda s: s[0] - s[-1] <= 1)
)


def make_step(updates):
    """A step that updates the same weights once for each list of losses, the later ones at the weights that the earlier ones have left."""

    def step(state, batch):
        (weights, momentum), (x, labels, mask) = state, batch

        def total(weights, losses):
            values = jnp.tanh(x @ weights[0]) @ weights[1]
            result = 0.0
            for chain, number in losses:
                rows = values
                for name in chain:
                    rows = of_rows(name, labels, mask)(rows)
                result += of_batch(number)(rows)
            return jnp.sin(result)

        for losses in updates:
            gradients = jax.grad(total)(weights, losses)
            size = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients) + 1e-3)
            momentum = [0.9 * m + g / size for m, g in zip(momentum, gradients, strict=True)]
            weights = [w - 0.1 * m for w, m in zip(weights, momentum, strict=True)]
        return (weights, momentum), ()

    return step


@settings(max_examples=cases(1, 200))
@example(
    [[(["scattered", "pairs", "centred"], "spread"), ([], "mean")], [([], "mean")]], [3, 2], 2
)  # rows are compared with their maximum
@given(updates=st.lists(LOSSES, min_size=1, max_size=3), sizes=SHARDS, seed=st.integers(0, 99))
def test_a_drawn_step_is_that_of_the_whole_batch(updates, sizes, seed):
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    with jax.enable_x64(True):
        weights = [jnp.asarray(rng.normal(size=shape)) for shape in ((WIDTH, WIDTH), (WIDTH,))]
        batch = (
            jnp.asarray(rng.normal(size=(rows, WIDTH))),
            jnp.asarray(rng.integers(0, CLASSES, rows)),
            jnp.asarray(rng.random(rows) < 0.7),
        )
        batch = (*batch[:2], batch[2].at[0].set(True))
        error, _ = compare(make_step(updates), (weights, [jnp.zeros_like(w) for w in weights]), batch, sizes, jit=lambda f: f)
    assert error < CLOSE
