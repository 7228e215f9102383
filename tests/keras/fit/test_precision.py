"""Half precision under Keras' policies, and loss scales: one for all replicas."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import unisono as un
from sizes import BATCH, ROWS, cases, slow
from trainings import (
    assert_same_bits,
    distance,
    fitting,
    net,
    on,
    rows,
    run,
    tanh,
    weights,
)

X, Y = rows(ROWS, 5), 3 * rows(ROWS, 2, seed=1)
FIT = fitting(X, Y, batch_size=BATCH)


def scaled(growth=2, **options):
    """SGD with momentum under a loss scale of 16 that doubles after `growth` good steps."""
    inner = lambda: optimizers.SGD(0.05, momentum=0.9, **options)
    return lambda: optimizers.LossScaleOptimizer(inner(), initial_scale=16.0, dynamic_growth_steps=growth)


def regressor(optimizer, **options):
    return net(tanh(7), 2, optimizer=optimizer, **options)


def bad(kind, row=7):
    """The rows, one of them with what is not a number, or too large for one."""
    x = X[:BATCH].copy()
    x[row] = kind
    return x


def counters(model):
    """(loss scale, good steps since it changed, steps that were taken)."""
    optimizer = model.optimizer
    return tuple(float(v.value) for v in (optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations))


@pytest.mark.parametrize("kind", [np.nan, *slow(np.inf)])
def test_the_loss_scale_grows_and_halves_as_in_keras(kind):
    """Good and bad batches in turns: scale, good steps and iterations after each, on every placement. A bad step is none."""
    batches = [X[:8], X[8:16], bad(kind), X[16:24], bad(kind, 0), bad(kind), X[24:32], X[25:], X[:3]]
    seen = []
    for strategy in (None, on(1), on(3), *cases((), (on(8),))):
        of_run: list = []
        model = run(regressor(scaled()), lambda model: model, strategy).model
        for x in batches:
            before = un.fingerprint(weights(model))
            model.train_on_batch(x, Y[: len(x)])
            of_run.append(counters(model))
            assert (un.fingerprint(weights(model)) != before) == np.isfinite(x).all()
        seen.append((of_run, un.fingerprint(model) if strategy else None))
    assert all(other == seen[1] for other in seen[2:])
    assert seen[1][0] == seen[0][0]
    assert seen[0][0] == [
        (16, 1, 1), (32, 0, 2), (16, 0, 2), (16, 1, 3), (8, 0, 3), (4, 0, 3), (4, 1, 4), (8, 0, 5), (8, 1, 6),
    ]  # fmt: skip


def test_a_loss_scale_changes_nothing_that_is_finite():
    """Scales are powers of two: the weights are those without a scale, to the bit."""
    plain = run(regressor(lambda: optimizers.SGD(0.05, momentum=0.9)), FIT, on(3)).model
    assert un.fingerprint(weights(run(regressor(scaled()), FIT, on(3)).model)) == un.fingerprint(weights(plain))


@pytest.mark.filterwarnings("ignore:The loss is (nan|inf) in ")
def test_a_bad_step_within_an_execution():
    """Of five steps in one call the third is skipped, and the two after it count on the halved scale."""
    x = X.copy()
    x[2 * BATCH + 1] = np.nan
    make, fit = regressor(scaled(), steps_per_execution=5), fitting(x, Y, batch_size=BATCH)
    ours, plain = assert_same_bits(make, fit), run(make, fit)
    assert counters(ours.model) == counters(plain.model) == (32.0, 0.0, 4.0)
    assert distance(ours.model, plain.model) <= 1e-6


# Keras' policies, which give a model a loss scale.


@pytest.fixture
def policy():
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


def made(devices: int, optimizer=None) -> keras.Model:
    keras.utils.set_random_seed(0)
    with on(devices).scope():
        model = keras.Sequential([layers.Input((5,)), layers.Dense(8, "relu"), layers.Dense(2, dtype="float32")])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_a_mixed_policy_is_that_of_keras(policy):
    """The bits and the scale are the same on every placement; dtypes can be printed; one infinite replica skips the step for all."""
    policy("mixed_float16")
    seen, x = [], X[:24].copy()
    x[9] = 60000.0  # finite in float16, infinite after a matrix product; a row of replica 3
    for devices in cases((1, 3), (1, 3, 8)):
        model = made(devices)
        hidden, last = model.layers
        assert (hidden.compute_dtype, hidden.variable_dtype, last.compute_dtype) == ("float16", "float32", "float32")
        assert {v.dtype for v in model.trainable_variables} == {"float32"}
        fitting(X, Y, batch_size=24)(model)
        before, scale = un.fingerprint(model.get_weights()), float(model.optimizer.dynamic_scale.value)
        model.train_on_batch(x, Y[:24])
        assert un.fingerprint(model.get_weights()) == before
        assert float(model.optimizer.dynamic_scale.value) == scale / 2
        model.train_on_batch(X[:24], Y[:24])
        assert un.fingerprint(model.get_weights()) != before
        seen.append((un.fingerprint(model), float(model.optimizer.dynamic_scale.value)))
    assert len(set(seen)) == 1
    assert seen[0][1] == scale / 2


def test_gradients_are_clipped_after_they_are_unscaled(policy):
    """The step of a clipped optimizer is bounded by its clip, not by the scale of thousands."""
    policy("mixed_float16")
    model = made(3, keras.optimizers.SGD(1.0, global_clipnorm=0.01))
    before = np.concatenate([w.ravel() for w in weights(model)])
    model.train_on_batch(X[:24], Y[:24])
    np.testing.assert_allclose(np.linalg.norm(np.concatenate([w.ravel() for w in weights(model)]) - before), 0.01, rtol=1e-4)


class Counted(keras.Model):
    """Has a counter and a factor of its own, beside those of a layer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.factor = self.add_weight(shape=(), initializer=keras.initializers.Constant(1.001), name="factor")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
        return self.dense(x) * self.factor


@pytest.mark.parametrize("replicas", [None, 1, 4])
def test_variables_of_the_model_itself_are_not_rounded(replicas, policy):
    """In bfloat16 there is no number 257. Keras' fit does not cast them either."""
    policy("mixed_bfloat16")
    with un.OneDeviceStrategy(replicas=replicas).scope() if replicas else contextlib.nullcontext():
        model = Counted()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.steps.assign(250.0)
    model.fit(np.tile(X[:24], (2, 1)), np.tile(Y[:24], (2, 1)), batch_size=4, verbose=0)
    assert float(model.steps.value) == 262
