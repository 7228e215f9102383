"""Random numbers of a fixed seed: `fit` draws what plain Keras draws, and how draws for rows are found in a loop."""

import jax
import keras
import pytest
from keras import layers

from sizes import mostly_slow
from trainings import assert_equals_keras, fitting, rows
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


def around(layer, model_class=keras.Model):
    def make():
        inputs = layers.Input((4,))
        return model_class(inputs, layers.Dense(2)(layer()(inputs)), name="net")

    return make


FIXED = {
    "a layer": around(lambda: Noise(1)),
    "a key": around(DroppedByKey),
    "a step": around(layers.ReLU, NoisyStep),
    "a generator": around(lambda: Noise(keras.random.SeedGenerator(1))),
    "weights": around(Projection),
}


@pytest.mark.parametrize("what", mostly_slow(FIXED, "a step", "a generator"))
def test_rows_get_the_numbers_that_they_get_in_keras(what):
    """In training and in evaluation."""

    def make():
        model = FIXED[what]()
        model.compile("sgd", "mse")
        return model

    assert_equals_keras(make, fitting(X, Y, batch_size=10, validation_data=(X[:10], Y[:10])), replicas=(4,))


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
