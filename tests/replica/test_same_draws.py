"""Random numbers of a fixed seed in `fit`: replicas that draw the same for their rows are told."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import slow
from trainings import on, rows
from unisono._src.replica.same_draws import find_draw_for_rows, list_constant_draws

X, Y = rows(16, 4), rows(16, 2, seed=1)


class Noise(layers.Layer):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed)


class DroppedByKey(layers.Layer):
    def call(self, x):
        return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


class Projection(layers.Layer):
    """Fixed weights, and as many of them as a replica has rows."""

    def call(self, x):
        return x @ keras.random.normal((4, 4), seed=3)


class NoisyStep(keras.Model):
    def train_step(self, state, data):
        x, y = data
        return super().train_step(state, (x + keras.random.normal(keras.ops.shape(x), seed=1), y))


def warned(make, replicas, batch_size=16, method="fit"):
    with on(1, replicas).scope():
        model = make()
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        getattr(model, method)(X, Y, batch_size=batch_size, verbose=0)
    return [str(one.message) for one in said if "fixed seed" in str(one.message)]


def around(layer, model_class=keras.Model):
    def make():
        inputs = layers.Input((4,))
        return model_class(inputs, layers.Dense(2)(layer()(inputs)), name="net")

    return make


SAME = [
    around(lambda: Noise(1)),
    around(DroppedByKey),
    around(layers.ReLU, NoisyStep),
]


@pytest.mark.parametrize("make", [SAME[0], SAME[2], *slow(SAME[1])])
@pytest.mark.parametrize(("replicas", "batch_size", "shape"), [(4, 16, r"\(4, 4\)"), *slow((8, 8, r"\(1, 4\)"))])
def test_replicas_that_draw_the_same_are_told(make, replicas, batch_size, shape):
    with on(1, replicas).scope():
        model = make()
    model.compile("sgd", "mse")
    text = (
        rf"The model 'net' draws random numbers of shape {shape}, some for each row, from a fixed seed: each of the {replicas} replicas gets "
        r"the same numbers for its rows, in every step\. .*self\.seeds = keras\.random\.SeedGenerator\(1\)"
    )
    with pytest.warns(UserWarning, match=text):
        model.fit(X, Y, batch_size=batch_size, verbose=0)


def test_evaluation_is_told_too():
    assert len(warned(SAME[0], 2, method="evaluate")) == 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Noise(keras.random.SeedGenerator(1)),
        Projection,
        *slow(lambda: layers.Dropout(0.5, seed=1), lambda: layers.GaussianNoise(0.5, seed=1)),
    ],
)
def test_generators_and_fixed_weights_pass(layer):
    assert warned(around(layer), 4) == []


def test_one_replica_draws_what_plain_keras_draws():
    assert warned(SAME[0], 1) == []


def test_what_the_warning_says_to_write_draws_other_numbers_for_each_replica():
    """The rows are equal, and the predictions with noise are not."""
    with un.OneDeviceStrategy(replicas=4).scope():
        model = around(lambda: Noise(keras.random.SeedGenerator(1)))()
    predictions = model.predict(np.ones((4, 4)), batch_size=4, verbose=0)
    assert len(np.unique(predictions, axis=0)) == 4


def test_code_that_fails_on_more_rows_is_not_told():
    def draws_of(count):
        if count > 2:
            raise ValueError("two rows")
        return [(count, 3)]

    assert find_draw_for_rows(draws_of, 2) is None
    assert find_draw_for_rows(lambda count: [(), (5,), (count, 3)], 2) == (2, 3)


def test_draws_inside_of_calls_and_of_no_argument_are_listed():
    def draw(key, x):
        fixed = jax.jit(lambda: jax.random.normal(jax.random.key(1), (2, 3)))()
        return jax.random.normal(key, (5, 3)).sum() + fixed.sum() + x

    assert list_constant_draws(jax.make_jaxpr(draw)(jax.random.key(0), 1.0)) == [(2, 3)]
