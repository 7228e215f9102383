"""Keras' own files, in every direction: saved in a scope or outside, opened in one or outside, and then one more step."""

from __future__ import annotations

import contextlib
import itertools

import keras
import pytest
from keras import layers

import unisono as un
from sizes import mostly_slow
from trainings import distance, labels, on, rows

X, Y = rows(36, 6), labels(36, 3)


def make():
    keras.utils.set_random_seed(2)
    x = inputs = layers.Input((6,))
    x = layers.BatchNormalization()(layers.Dense(8, "relu")(x))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def inside(strategy):
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def step(model, number):
    model.fit(X[12 * number : 12 * number + 12], Y[12 * number : 12 * number + 12], batch_size=12, shuffle=False, verbose=0)


def of_file(model, path, how):
    """A model like this one, out of a file."""
    if how == "keras":
        model.save(path / "m.keras")
        return lambda: keras.saving.load_model(path / "m.keras")
    model.save_weights(path / "m.weights.h5")

    def loaded():
        fresh = make()
        fresh.optimizer.build(fresh.trainable_variables)
        fresh.load_weights(path / "m.weights.h5")
        return fresh

    return loaded


ONCE = [("R = 4 on 3", "R = 4 on 1", "keras"), ("R = 4 on 1", "outside", "weights.h5"), ("outside", "R = 4 on 3", "keras")]
PLACES = {"outside": lambda: None, "R = 4 on 1": lambda: on(1, 4), "R = 4 on 3": lambda: on(3, 4)}


@pytest.mark.parametrize(
    ("here", "there", "how"),
    mostly_slow(itertools.product(PLACES, PLACES, ("keras", "weights.h5")), *ONCE),
)
def test_the_next_step_is_that_of_the_run_that_was_not_interrupted(tmp_path, here, there, how):
    """The optimizer's state with it. With the same R to the bit."""
    with inside(PLACES[here]()):
        model = make()
    step(model, 0)
    load = of_file(model, tmp_path, how)
    with inside(PLACES[there]()):
        opened = load()
    assert un.fingerprint(opened) == un.fingerprint(model)
    step(model, 1)
    step(opened, 1)
    assert int(opened.optimizer.iterations.value) == 2
    if "outside" not in (here, there):
        assert un.fingerprint(opened) == un.fingerprint(model)
    else:  # plain Keras promises no bits, and R = 4 has other batches for BatchNorm
        assert distance(opened, model) < (1e-6 if here == there else 0.05)
