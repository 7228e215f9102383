"""fit, evaluate and predict in a scope give what plain Keras gives, and the same bits on every number of devices."""

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import ROWS_AT_ONCE, cases, mostly_slow, slow
from trainings import (
    ADAM_TOLERANCE,
    PLACEMENTS,
    SGD_TOLERANCE,
    assert_equals_keras,
    assert_same_bits,
    distance,
    fitting,
    labels,
    on,
    rows,
    run,
)

CLASSES = 3
DEVICES = cases((1, 3), (1, 3, 8))


def classifier(*stack, optimizer=None):
    """A function that makes and compiles a classifier from layer functions: layers are made anew for every run."""

    def make():
        model = keras.Sequential([*(layer() for layer in stack), layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    return make


IMAGES, WORDS, SERIES = rows(43, 6, 6, 2), np.arange(43 * 5).reshape(43, 5) % 13, rows(43, 5, 4)
FAMILIES = {
    "dense": (rows(43, 5), [lambda: layers.Dense(7, "tanh", kernel_regularizer="l2")]),
    "conv and max-pooling": (IMAGES, [lambda: layers.Conv2D(4, 3, activation="tanh"), layers.MaxPooling2D, layers.Flatten]),
    "conv and average pooling": (
        IMAGES,
        [lambda: layers.Conv2D(4, 3, padding="same"), lambda: layers.AveragePooling2D(2), layers.GlobalAveragePooling2D],
    ),
    "embedding and average pooling": (WORDS, [lambda: layers.Embedding(13, 4), layers.GlobalAveragePooling1D]),
    "masked embedding": (WORDS, [lambda: layers.Embedding(13, 4, mask_zero=True), layers.GlobalAveragePooling1D]),
    "layer normalization": (rows(43, 5), [lambda: layers.Dense(6), layers.LayerNormalization]),
    "LSTM": (SERIES, [lambda: layers.LSTM(3)]),
    "GRU": (WORDS, [lambda: layers.Embedding(13, 4, mask_zero=True), lambda: layers.GRU(3)]),
}


COMMON = ("conv and max-pooling", "masked embedding")


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, *COMMON))
def test_five_steps_of_every_layer_family(family):
    """Weights, loss and accuracy after the steps of an epoch, the last of three rows, equal those of plain Keras."""
    x, stack = FAMILIES[family]
    devices = (3,) if family in ("LSTM", "GRU") else PLACEMENTS  # they compile long
    assert_equals_keras(classifier(*stack), fitting(x, labels(43, CLASSES), batch_size=ROWS_AT_ONCE), devices=devices)


@pytest.mark.parametrize("family", slow("dense", "masked embedding"))
def test_five_steps_of_one_replica(family):
    """One replica is plain Keras."""
    x, stack = FAMILIES[family]
    assert_equals_keras(classifier(*stack), fitting(x, labels(43, CLASSES), batch_size=ROWS_AT_ONCE), replicas=(1,))


def test_a_shuffled_training_equals_keras_where_the_rows_are_mixed_before():
    """The line of the FAQ. With the default, Keras shuffles by NumPy's generator, and the order here depends on seed, pass and batch alone."""
    x, y = rows(43, 5), labels(43, CLASSES)
    order = np.random.default_rng(0).permutation(len(x))
    make = classifier(lambda: layers.Dense(7, "tanh"))
    mixed = fitting(x[order], y[order], batch_size=ROWS_AT_ONCE, epochs=2, shuffle=False)
    assert_equals_keras(make, mixed, replicas=cases((8,), (1, 8)), devices=(1,))
    shuffled = fitting(x, y, batch_size=ROWS_AT_ONCE, shuffle=True)
    assert distance(run(make, shuffled).model, run(make, shuffled, on(1, 1)).model) > 100 * SGD_TOLERANCE


@pytest.mark.slow
def test_five_steps_of_a_transformer_block():
    """Attention with a residual and normalization, one label a position, equals plain Keras."""

    def make():
        words = keras.Input((5,), dtype="int32")
        x = layers.Embedding(13, 6, mask_zero=True)(words)
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(2, 3)(x, x)]))
        model = keras.Model(words, layers.TimeDistributed(layers.Dense(CLASSES))(x))
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    assert_equals_keras(make, fitting(WORDS, labels(43, CLASSES, 5), batch_size=10), devices=(3,))


@pytest.mark.slow
def test_embedding_and_time_distributed_dense():
    """A masked sequence model with one output a position equals plain Keras."""
    stack = [lambda: layers.Embedding(13, 4, mask_zero=True), lambda: layers.TimeDistributed(layers.Dense(5, "tanh"))]
    assert_equals_keras(classifier(*stack), fitting(WORDS, labels(43, CLASSES, 5), batch_size=10))


@pytest.mark.slow
def test_adam_after_five_steps():
    """Adam stays within its wider bound of plain Keras."""
    make = classifier(lambda: layers.Dense(7, "tanh"), optimizer=keras.optimizers.Adam)
    assert_equals_keras(make, fitting(rows(43, 5), labels(43, CLASSES), batch_size=10), tolerance=ADAM_TOLERANCE)


@pytest.mark.slow
def test_two_fits_of_a_regularized_net_on_many_rows():
    """9984 rows in batches of 64, fitted twice: history, metrics and predictions of plain Keras, equal bits on three placements."""
    x, target = rows(9984, 4), rows(9984, 2, seed=5)

    def make():
        model = keras.Sequential([layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(0.01)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    def fit(model):
        fitting(x, target, batch_size=64)(model)
        return fitting(x, target, batch_size=64)(model)

    plain = run(make, fit)
    ours = assert_same_bits(make, fit, devices=(1, 3, 8))
    for name, values in plain.logs.items():
        np.testing.assert_allclose(ours.logs[name], values, rtol=1e-5)
    np.testing.assert_allclose(ours.model.predict(x, verbose=0), plain.model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.model.evaluate(x, target, verbose=0), plain.model.evaluate(x, target, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("batch", [4, *slow(6, 32, 1)])
def test_evaluation_counts_every_row_once(batch):
    """Ten rows in any batches, on replicas of which some have none: loss and metrics of the whole set."""
    x, y = rows(10, 5), labels(10, CLASSES)
    make = classifier(lambda: layers.Dense(7, "tanh", kernel_regularizer="l2", activity_regularizer=None))
    whole = run(make, lambda model: model).model.evaluate(x, y, batch_size=10, verbose=0)
    found = [run(make, lambda model: model, on(devices)).model.evaluate(x, y, batch_size=batch, verbose=0) for devices in (1, 3)]
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], whole, rtol=1e-5)


def test_evaluation_with_steps_given():
    """The first three batches of four: the metrics of twelve rows."""
    x, y = rows(14, 5), labels(14, CLASSES)
    model = run(classifier(lambda: layers.Dense(7, "tanh")), lambda model: model, on(3)).model
    found = model.evaluate(x, y, batch_size=4, steps=3, verbose=0)
    np.testing.assert_allclose(found, model.evaluate(x[:12], y[:12], batch_size=12, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("batch", [10, *slow(4, 3)])
def test_predictions_are_the_rows_in_order(batch):
    """Exactly as many rows as came in, in their order, equal to plain Keras up to rounding."""
    x, make = rows(10, 5), classifier(lambda: layers.Dense(7, "tanh"))
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
    make = classifier(lambda: layers.Dense(7, "tanh"))
    inside = run(make, fitting(x[:30], y[:30], batch_size=7, epochs=2, validation_data=(x[30:], y[30:])), on(3))
    by_hand = run(make, lambda model: model, on(3)).model
    for epoch in range(2):
        fitting(x[:30], y[:30], batch_size=7, initial_epoch=epoch, epochs=epoch + 1)(by_hand)
        logs = by_hand.evaluate(x[30:], y[30:], batch_size=7, verbose=0, return_dict=True)
        assert {f"val_{name}": value for name, value in logs.items()} == {
            name: values[epoch] for name, values in inside.logs.items() if name.startswith("val_")
        }
    assert un.fingerprint(by_hand) == un.fingerprint(inside.model)


@pytest.mark.parametrize("layer", [lambda: layers.LSTM(3, stateful=True), lambda: layers.BatchNormalization(synchronized=True)])
def test_layers_that_see_rows_of_other_replicas_are_refused(layer):
    """A stateful LSTM and a synchronized BatchNormalization are refused on one device as on many, and run with one replica."""
    for strategy in (on(1), on(3)):
        with pytest.raises(ValueError, match="replicas=1|synchronized=True"):
            run(classifier(layer), fitting(SERIES[:12], labels(12, CLASSES), batch_size=4), strategy)


def test_one_dimensional_targets():
    """Targets without a last axis give plain Keras' loss, which expands them."""

    def make():
        model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    assert_equals_keras(make, fitting(rows(43, 5), rows(43, seed=2), batch_size=ROWS_AT_ONCE))


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
