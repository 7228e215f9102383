"""Steps of Keras models in phases: on shards of several sizes they change the state as plain Keras does on the whole batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers as L  # noqa: N812
from keras import ops

from sizes import mostly_slow
from whole_batch_layers import Experts, Queue, between, mlp
from whole_batch_losses import CLASSES, SPARSE, contrast, cross_entropy, dice, masked_mean, pairs_of_neighbours, rmse
from whole_batch_of_phases import CLOSE, ROWS, analyse, compare, make_batch, make_step, run_phased


def recurrent():
    return keras.Sequential([L.Input((4,)), L.Embedding(20, 6, mask_zero=True), L.Bidirectional(L.GRU(5)), L.Dense(CLASSES)])


def drawing():
    layers = [
        L.RandomFlip(seed=1),
        L.RandomContrast(0.2, seed=3),
        L.Flatten(),
        L.Dense(8),
        L.Dropout(0.5, seed=1),
        L.GaussianNoise(0.1, seed=2),
    ]
    return keras.Sequential([L.Input((8, 8, 3)), *layers, L.Dense(CLASSES)])


def normalized():
    return keras.Sequential([L.Input((8,)), L.Dense(8), L.BatchNormalization(), L.ReLU(), L.Dense(CLASSES)])


def hardest_half(y, logits):
    return ops.mean(ops.sort(cross_entropy(y, logits))[ROWS // 2 :])


OF_MODELS = {
    "mlp": (lambda: mlp(kernel_regularizer="l2"), SPARSE, 1),
    "recurrent": (recurrent, SPARSE, 1),
    "draws by row": (drawing, SPARSE, 1),
    "balance of experts": (between(Experts), SPARSE, 2),
    "queue and largest": (between(Queue), SPARSE, 3),
}
OF_LOSSES = {
    "rmse": (rmse, 2),
    "dice": (dice, 2),
    "contrast": (contrast, 2),
    "hardest half": (hardest_half, 2),
    "masked mean": (masked_mean, 2),
}
CASES = OF_MODELS | {name: (mlp, loss, phases) for name, (loss, phases) in OF_LOSSES.items()}


@pytest.mark.parametrize("case", mostly_slow(CASES, "mlp", "recurrent", "draws by row", "queue and largest", "contrast"))
def test_train_step_of_keras(case, rng):
    make_model, loss, phases = CASES[case]
    model = make_model()
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=1.0), loss, metrics=["accuracy"])
    x, y = make_batch(model, rng)
    model.train_on_batch(x, y)
    weights = rng.random(ROWS).astype("float32")
    batch = (x, y, weights) if loss is SPARSE else (x, y)
    step, state = make_step(model)
    error, phased = compare(lambda state, batch: step(state, batch)[::-1], state, batch)
    assert error < CLOSE
    assert len(phased.phases) == phases


def test_rows_that_are_compared_with_their_maximum_are_kept(rng):
    """Two programs may round them in two ways."""
    model = mlp()
    weights = [v.value for v in model.trainable_variables]

    def step(weights, batch):
        gradients = jax.grad(lambda weights: ops.max(model.stateless_call(weights, [], batch[0])[0][:, 0]))(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], ()

    error, phased = compare(step, weights, (rng.normal(size=(ROWS, 8)).astype("float32"),))
    assert error < CLOSE
    assert [len(phase.kept) for phase in phased.phases] == [1, 0, 0]
    assert [phase.uses for phase in phased.phases] == [[], phased.phases[0].kept, phased.phases[0].kept]


def test_statistics_of_a_batch_are_those_of_a_replica_unless_synchronized(rng):
    model = normalized()
    model.compile("sgd", SPARSE)
    batch = make_batch(model, rng)
    model.train_on_batch(*batch)
    step, state = make_step(model)
    turned = lambda state, batch: step(state, batch)[::-1]
    own, phased = compare(turned, state, batch)
    whole, synchronized = compare(turned, state, batch, local="nowhere")
    assert own > 1e-3
    assert whole < CLOSE
    assert len(phased.phases) == 1 < len(synchronized.phases)


def test_views_behind_each_other_stay_rows(rng):
    """Two views of a batch go through the model as one batch of twice the rows: nothing is gathered before the pairs."""
    model = mlp()
    weights = [v.value for v in model.trainable_variables]

    def step(weights, batch):
        def loss(weights):
            z, _ = model.stateless_call(weights, [], ops.concatenate([batch[0], batch[0] * 2], axis=0))
            first, second = ops.split(z, 2, axis=0)
            return ops.mean((first - second) ** 2) + ops.mean(ops.repeat(ops.sum(z, -1), 3) ** 2)

        gradients = jax.grad(loss)(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], ()

    error, phased = compare(step, weights, (rng.normal(size=(ROWS, 8)).astype("float32"),))
    assert error < CLOSE
    assert not phased.analysis.gathered


def test_of_pairs_of_neighbours_the_scores_alone_are_gathered(rng):
    """Three rows are no pairs, so that the code is traced for twice the batch."""
    model = mlp()
    weights = [v.value for v in model.trainable_variables]

    def step(weights, batch):
        gradients = jax.grad(lambda w: pairs_of_neighbours(None, model.stateless_call(w, [], batch[0])[0]))(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], ()

    batch = (rng.normal(size=(ROWS, 8)).astype("float32"),)
    error, phased = compare(step, weights, batch, traced=(2 * ROWS,))
    assert error < CLOSE
    assert [variable.aval.shape for variable in phased.analysis.gathered] == [(ROWS,)]


def test_a_sum_is_rounded_once(rng):
    """Under mixed precision code rounds sums over rows, as the gradient of a bias: parts of shards are added before."""
    x = rng.integers(0, 200, (ROWS, 8)).astype("float32")

    def step(weights, batch):
        return [weights[0] - jnp.sum(batch[0], axis=0).astype("bfloat16").astype("float32")], ()

    weights = [jnp.zeros(8)]
    (got,) = run_phased(analyse(step, weights, (x,)), weights, (x,))
    np.testing.assert_array_equal(got, step(weights, (x,))[0][0])


OF_ROWS = {
    "a search": lambda x: x * jnp.searchsorted(jnp.arange(3.0), x),
    "a histogram": lambda x: x * jnp.histogram(jax.lax.stop_gradient(x), 5, (-3.0, 3.0))[0][0],
    "tiles": lambda x: jnp.tile(x, (2, 3, 1)),
    "a linear system": lambda x: jnp.linalg.solve(x @ jnp.swapaxes(x, 1, 2) + 3 * jnp.eye(4), x),
    "frames": lambda x: ops.abs(ops.stft(x.reshape(-1, 16), 4, 2, 4)[0]),
    "gamma draws": lambda x: jax.vmap(lambda row, place: jax.random.gamma(jax.random.key(place), row**2 + 1))(
        x, jnp.arange(len(x))
    ),
    "one gamma draw": lambda x: jax.random.gamma(jax.random.key(0), 2.0, (len(x), 4, 4)) * x,
    "a tangent and a logarithm": lambda x: jnp.tanh(x) * jnp.log2(x * x + 2),
    "subtractions": lambda x: jnp.zeros_like(x).at[:, 0].subtract(x[:, 1]),
}
"""Functions of rows of four by four numbers, by what they do to each row."""


def test_operations_within_a_row_gather_nothing(rng):
    def step(weights, batch):
        def loss(weights):
            return sum(jnp.mean(jnp.cos(function(batch[0] @ w))) for function, w in zip(OF_ROWS.values(), weights, strict=True))

        return [w - 0.1 * gradient for w, gradient in zip(weights, jax.grad(loss)(weights), strict=True)], ()

    weights = list(rng.normal(size=(len(OF_ROWS), 4, 4)).astype("float32"))
    error, phased = compare(step, weights, (rng.normal(size=(ROWS, 4, 4)).astype("float32"),))
    assert error < CLOSE
    assert [equation.name for equation in phased.analysis.gathered.values()] == []
