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

from drawn_programs import CLASSES, LOSSES, WIDTH, compute_loss
from sizes import cases
from whole_batch_of_phases import compare

CLOSE = 1e-10


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
            return compute_loss(jnp.tanh(x @ weights[0]) @ weights[1], labels, mask, losses)

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
