"""Random numbers: rows draw what they draw in plain Keras, in `fit` and in loops."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import slow
from unisono._src.keras.replica import random_keys


def masks(strategy: un.Strategy | None, rows: int = 16, steps: int = 2) -> list[np.ndarray]:
    """What two dropout layers of one shape do to ones, seen through the gradients of weights that start at zero."""
    keras.utils.set_random_seed(0)

    def make() -> keras.Model:
        inputs = layers.Input((8,))
        outputs = [layers.Dropout(0.5)(inputs), layers.Dropout(0.5)(inputs)]
        return keras.Model(inputs, [layers.EinsumDense("bi,ij->bj", (4,), kernel_initializer="zeros")(o) for o in outputs])

    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    model.compile(keras.optimizers.SGD(1.0), loss=["mae", "mae"])
    model.fit(np.ones((rows, 8)), [-np.ones((rows, 4))] * 2, batch_size=rows, epochs=steps, shuffle=False, verbose=0)
    return [np.asarray(w) for w in model.get_weights()]


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_rows_get_the_masks_that_they_get_in_plain_keras(replicas):
    """Also where replicas have numbers of rows that differ. Sums of a mask are whole numbers, which no order of the sum changes."""
    plain, ours = masks(None, 14), masks(un.OneDeviceStrategy(replicas=replicas), 14)
    for one, other in zip(plain, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


class AlwaysDropout(layers.Dropout):
    """Monte Carlo dropout: it draws in prediction too."""

    def call(self, x, training=False):
        return super().call(x, training=True)


def test_prediction_draws_what_plain_keras_draws_and_goes_on():
    """Batches and calls draw anew; rows get the same masks on every placement."""
    seen = {}
    for name, strategy in {
        "plain": None,
        "one": un.OneDeviceStrategy(),
        "four on one": un.OneDeviceStrategy(replicas=4),
        "four on three": un.MirroredStrategy(devices=3, replicas=4),
    }.items():
        keras.utils.set_random_seed(0)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = keras.Sequential([layers.Input((6,)), AlwaysDropout(0.5)])
        calls = [model.predict(np.ones((14, 6), "float32"), 7, 0, None, []) for _ in range(2)]
        assert not np.array_equal(calls[0], calls[1])
        assert not np.array_equal(calls[0][:7], calls[0][7:])
        seen[name] = un.fingerprint(calls, *model.variables)
    assert len(set(seen.values())) == 1


def masks_of_a_loop(strategy: un.Strategy, rows: int = 14, steps: int = 2) -> list[np.ndarray]:
    """What `masks` does, in a loop; beside it noise that the replica's code draws itself, one number for each row."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dropout(0.5), layers.Dense(4, kernel_initializer="zeros")])
        optimizer, seeds = keras.optimizers.SGD(1.0), keras.random.SeedGenerator(5)

    def step(x):
        noise = keras.random.normal((keras.ops.shape(x)[0], 1), seed=seeds)
        _, gradients = un.value_and_grad(lambda: keras.ops.sum(model(x, training=True), axis=1), model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return noise

    for batch in strategy.distribute_dataset(np.ones((rows * steps, 8), "float32"), batch_size=rows):
        noise = strategy.run(step, args=(batch,))
    return [*map(np.asarray, model.get_weights()), np.asarray(strategy.gather(noise, axis=0)), np.asarray(seeds.state.value)]


def test_rows_of_a_loop_draw_what_they_draw_on_one_replica():
    """In layers, and by hand; on any devices, in shards of several sizes."""
    whole = masks_of_a_loop(un.OneDeviceStrategy())
    cut = masks_of_a_loop(un.OneDeviceStrategy(replicas=4))
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert un.fingerprint(cut) == un.fingerprint(masks_of_a_loop(un.MirroredStrategy(devices=3, replicas=4)))


def test_a_step_moves_every_state_on_by_what_it_drew():
    with un.OneDeviceStrategy(replicas=4).scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dropout(0.5), layers.Dropout(0.5), layers.Dense(1)])
    model.compile("sgd", "mse")
    seeds = [v for v in model.variables if random_keys.is_seed_state(v)]
    before = [np.asarray(v) for v in seeds]
    model.fit(np.ones((12, 8)), np.ones((12, 1)), batch_size=4, verbose=0)
    assert [(np.asarray(v) - b).tolist() for v, b in zip(seeds, before, strict=True)] == [[0, 3], [0, 3]]
    model.evaluate(np.ones((12, 8)), np.ones((12, 1)), verbose=0)
    assert [(np.asarray(v) - b).tolist() for v, b in zip(seeds, before, strict=True)] == [[0, 3], [0, 3]]
