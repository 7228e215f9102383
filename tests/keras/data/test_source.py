"""Batches come divided, with their position, and one ahead where none can be lost."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from unisono._src.keras.data.source import read_one_ahead


def test_a_batch_is_asked_for_before_the_one_before_it_is_handed_out():
    asked = []

    def source():
        for number in range(4):
            asked.append(number)
            yield number

    for number in read_one_ahead(source()):
        assert asked == list(range(min(number + 2, 4)))


def test_an_error_comes_in_its_turn():
    def source():
        yield 1
        yield 2
        raise OSError("gone")

    seen = []
    with pytest.raises(OSError, match="gone"):
        seen.extend(iter(read_one_ahead(source())))
    batches = read_one_ahead(source())
    assert [next(batches), next(batches)] == [1, 2]


def test_no_batch_of_a_generator_is_taken_ahead(rng):
    """What was taken from a generator and not trained on would be lost to the next fit."""
    x, y = rng.standard_normal((40, 3)).astype("float32"), rng.standard_normal((40, 2)).astype("float32")
    taken = []

    def batches():
        for start in range(0, 40, 4):
            taken.append(start)
            yield x[start : start + 4], y[start : start + 4]

    with un.OneDeviceStrategy(replicas=2).scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    source = batches()
    model.fit(source, steps_per_epoch=6, shuffle=False, verbose=0)
    assert len(taken) == 6
    assert len(list(source)) == 4


def test_the_batches_of_an_epoch_are_those_of_the_arrays(rng):
    """What Keras' loop sees: shapes and dtypes of the global batch, in order."""
    x, y = rng.standard_normal((7, 3)), np.arange(7)
    with un.OneDeviceStrategy(replicas=2).scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    model.fit(x, y % 2, batch_size=3, verbose=0, callbacks=[Watch()])
    assert seen == [0, 1, 2]


def test_predict_keeps_its_batches_where_keras_sends_them_ahead(rng, monkeypatch):
    """Unless JAX runs on CPU, Keras puts each batch on the first device before the step asks for it."""
    x = rng.standard_normal((41, 3)).astype("float32")
    with un.MirroredStrategy(devices=2, replicas=4).scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    wanted = un.fingerprint(model.predict(x, batch_size=6, verbose=0))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        found = un.fingerprint(model.predict(x, batch_size=6, verbose=0))
    assert found == wanted
