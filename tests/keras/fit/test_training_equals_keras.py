"""fit, evaluate and predict in a scope give what plain Keras gives, and the same bits on every number of devices."""

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import ROWS_AT_ONCE, cases, mostly_slow, slow
from trainings import (
    SGD_TOLERANCE,
    assert_equals_keras,
    crossentropy,
    distance,
    fitting,
    labels,
    net,
    on,
    rows,
    run,
    tanh,
)

CLASSES = 3
DEVICES = cases((1, 3), (1, 3, 8))


def classifier(*stack):
    return net(*stack, CLASSES, loss=crossentropy(), metrics=["accuracy"])


SERIES = rows(43, 5, 4)
FAMILIES = {
    "dense": (rows(43, 5), [tanh(7, kernel_regularizer="l2")]),
    "conv and max-pooling": (
        rows(43, 6, 6, 2), [lambda: layers.Conv2D(4, 3, activation="tanh"), layers.MaxPooling2D, layers.Flatten]
    ),
    "masked embedding": (
        np.arange(43 * 5).reshape(43, 5) % 13, [lambda: layers.Embedding(13, 4, mask_zero=True), layers.GlobalAveragePooling1D]
    ),
    "LSTM": (SERIES, [lambda: layers.LSTM(3)]),
}  # fmt: skip


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "conv and max-pooling", "masked embedding"))
def test_five_steps_of_every_layer_family(family):
    """Weights, loss and accuracy after the steps of an epoch, the last of three rows, equal those of plain Keras."""
    x, stack = FAMILIES[family]
    fit = fitting(x, labels(43, CLASSES), batch_size=ROWS_AT_ONCE)
    assert_equals_keras(classifier(*stack), fit, replicas=cases((8,), (1, 8)))


def test_a_shuffled_training_equals_keras_where_the_rows_are_mixed_before():
    """The line of the FAQ. With the default, Keras shuffles by NumPy's generator, and the order here depends on seed, pass and batch alone."""
    x, y = rows(43, 5), labels(43, CLASSES)
    order = np.random.default_rng(0).permutation(len(x))
    make = classifier(tanh(7))
    mixed = fitting(x[order], y[order], batch_size=ROWS_AT_ONCE, epochs=2, shuffle=False)
    assert_equals_keras(make, mixed, replicas=cases((8,), (1, 8)), devices=(1,))
    shuffled = fitting(x, y, batch_size=ROWS_AT_ONCE, shuffle=True)
    assert distance(run(make, shuffled).model, run(make, shuffled, on(1, 1)).model) > 100 * SGD_TOLERANCE


@pytest.mark.parametrize("batch", [4, *slow(6, 32, 1)])
def test_evaluation_counts_every_row_once(batch):
    """Ten rows in any batches, on replicas of which some have none: loss and metrics of the whole set."""
    x, y = rows(10, 5), labels(10, CLASSES)
    make = classifier(tanh(7, kernel_regularizer="l2"))
    whole = run(make, lambda model: model).model.evaluate(x, y, batch_size=10, verbose=0)
    found = [run(make, lambda model: model, on(devices)).model.evaluate(x, y, batch_size=batch, verbose=0) for devices in (1, 3)]
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], whole, rtol=1e-5)


def test_evaluation_with_steps_given():
    """The first three batches of four: the metrics of twelve rows."""
    x, y = rows(14, 5), labels(14, CLASSES)
    model = run(classifier(tanh(7)), lambda model: model, on(3)).model
    found = model.evaluate(x, y, batch_size=4, steps=3, verbose=0)
    np.testing.assert_allclose(found, model.evaluate(x[:12], y[:12], batch_size=12, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("batch", [10, *slow(4, 3)])
def test_predictions_are_the_rows_in_order(batch):
    """Exactly as many rows as came in, in their order, equal to plain Keras up to rounding."""
    x, make = rows(10, 5), classifier(tanh(7))
    plain = run(make, lambda model: model).model.predict(x, verbose=0)
    ours = [run(make, lambda model: model, on(devices)).model.predict(x, batch_size=batch, verbose=0) for devices in DEVICES]
    assert ours[0].shape == (10, CLASSES)
    np.testing.assert_allclose(ours[0], plain, rtol=1e-5, atol=1e-6)
    assert len({un.fingerprint(outputs) for outputs in ours}) == 1


def test_predictions_of_many_inputs_and_outputs():
    """Many rows in ragged batches: every output has its rows in order."""

    def make():
        one, two = keras.Input((3,), name="one"), keras.Input((4,), name="two")
        return keras.Model([one, two], {"sum": layers.Dense(2)(layers.Concatenate()([one, two])), "own": layers.Dense(1)(two)})

    count, batch = cases((43, 8), (200, 18))
    x = [rows(count, 3), rows(count, 4, seed=3)]
    plain = run(make, lambda model: model).model.predict(x, batch_size=batch, verbose=0)
    ours = [run(make, lambda model: model, on(devices)).model.predict(x, batch_size=batch, verbose=0) for devices in (1, 3)]
    assert set(ours[0]) == {"sum", "own"}
    assert un.fingerprint(ours[0]) == un.fingerprint(ours[1])
    for name, values in plain.items():
        np.testing.assert_allclose(ours[0][name], values, rtol=1e-5, atol=1e-6)


def test_evaluation_in_fit_equals_evaluation_by_hand():
    """The validation logs of each epoch are those of evaluate() after it, to the bit."""
    x, y = rows(43, 5), labels(43, CLASSES)
    make = classifier(tanh(7))
    inside = run(make, fitting(x[:30], y[:30], batch_size=7, epochs=2, validation_data=(x[30:], y[30:])), on(3))
    by_hand = run(make, lambda model: model, on(3)).model
    for epoch in range(2):
        fitting(x[:30], y[:30], batch_size=7, initial_epoch=epoch, epochs=epoch + 1)(by_hand)
        logs = by_hand.evaluate(x[30:], y[30:], batch_size=7, verbose=0, return_dict=True)
        assert {f"val_{name}": value for name, value in logs.items()} == {
            name: values[epoch] for name, values in inside.logs.items() if name.startswith("val_")
        }
    assert un.fingerprint(by_hand) == un.fingerprint(inside.model)


@pytest.mark.parametrize("shape", [(5,), *slow(((6, 6, 3),))])
def test_synchronized_batch_normalization_has_the_statistics_of_the_whole_batch(shape):
    """Keras refuses to make one on JAX; one that becomes so later is that of the whole batch, in training and in its moving statistics."""

    def make():
        hidden = layers.Conv2D(16, 3) if len(shape) > 1 else layers.Dense(16)
        normalization = layers.BatchNormalization()
        model = keras.Sequential([layers.Input(shape), hidden, normalization, layers.ReLU(), layers.Flatten(), layers.Dense(2)])
        normalization.synchronized = un.get_strategy().num_replicas_in_sync > 1
        model.compile("sgd", "mse")
        return model

    assert_equals_keras(make, fitting(rows(21, *shape), rows(21, 2), batch_size=12), replicas=(4,))
