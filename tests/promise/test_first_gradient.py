"""The summed gradient of R replicas is that of the one big batch, and so are five steps of SGD and Adam.

Families without batch statistics and random draws; masks, weights, ragged shards, add_loss and regularizers included.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from families import ROWS, Extra, crossentropy, padded
from sizes import slow

RATE = 1.0


def sentences():
    """Attention under a mask; mean over the valid entries, and weights for each of them."""
    x = inputs = layers.Input((10,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    h = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(h, h)])
    model = keras.Model(inputs, layers.Dense(5, kernel_regularizer="l2")(x))
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.1, 3, (ROWS, 10)).astype("float32")
    return model, {"loss": crossentropy()}, (padded(rng, 30), rng.integers(0, 5, (ROWS, 10)), weights)


def recurrent():
    """LSTM and GRU under a mask; mean by weights."""
    x = inputs = layers.Input((10,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(30, 8, mask_zero=True)(x))
    model = keras.Model(inputs, layers.Dense(4)(layers.GRU(6)(x)))
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.1, 3, ROWS).astype("float32")
    return (
        model,
        {"loss": crossentropy(reduction="mean_with_sample_weight")},
        (padded(rng, 30), rng.integers(0, 4, ROWS), weights),
    )


def pictures():
    """Convolution and pooling, an activity regularizer and an added loss."""
    inputs = layers.Input((9, 9, 2))
    x = layers.MaxPooling2D(2)(layers.Conv2D(4, 3, activation="relu", activity_regularizer="l1")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(Extra()(layers.Flatten()(x))))
    rng = np.random.default_rng(2)
    return model, {"loss": "mse"}, (rng.standard_normal((ROWS, 9, 9, 2)), rng.standard_normal((ROWS, 3)), None)


def two_outputs():
    """Two losses with weights of their own, one of them a plain sum."""
    inputs = layers.Input((6,))
    x = Extra()(layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs))
    model = keras.Model(inputs, [layers.Dense(3, name="a")(x), layers.Dense(1, name="b")(x)])
    rng = np.random.default_rng(3)
    targets = [rng.integers(0, 3, ROWS), rng.standard_normal((ROWS, 1))]
    losses = [crossentropy(), keras.losses.Huber(reduction="sum")]
    return model, {"loss": losses, "loss_weights": [0.7, 0.003]}, (rng.standard_normal((ROWS, 6)), targets, None)


def trained(make, optimizer, replicas, steps, rows):
    """(weights before, weights after) of some steps on the first rows; replicas None is plain Keras."""
    keras.utils.set_random_seed(0)
    if replicas is None:
        model, compile_, data = make()
    else:
        with un.OneDeviceStrategy(replicas=replicas).scope():
            model, compile_, data = make()
    model.compile(optimizer(), **compile_)
    before = model.get_weights()
    some = keras.tree.map_structure(lambda a: None if a is None else a[: rows * steps], data)
    model.fit(*some[:2], sample_weight=some[2], batch_size=rows, shuffle=False, verbose=0)
    return flat(before), flat(model.get_weights())


def flat(weights):
    return np.concatenate([w.ravel().astype("float64") for w in weights])


@pytest.mark.parametrize("make", [two_outputs, *slow(sentences, recurrent, pictures)])
@pytest.mark.parametrize("rows", [29, *slow(5)], ids=["ragged", "replicas without rows"])
def test_the_first_summed_gradient(make, rows):
    """One step of SGD at rate 1 moves the weights by the gradient."""
    gradients = {}
    for replicas in (None, 1, 8):
        before, after = trained(make, lambda: keras.optimizers.SGD(RATE), replicas, 1, rows)
        gradients[replicas] = before - after
    for other in (None, 1):
        distance = np.linalg.norm(gradients[8] - gradients[other]) / np.linalg.norm(gradients[other])
        assert distance <= 1e-6, other


@pytest.mark.slow
@pytest.mark.parametrize("make", [sentences, recurrent, pictures, two_outputs])
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        pytest.param(lambda: keras.optimizers.SGD(0.1), 1e-6, marks=pytest.mark.slow),
        (lambda: keras.optimizers.Adam(1e-3), 1e-5),
    ],
    ids=["sgd", "adam"],
)
def test_five_steps(make, optimizer, tolerance):
    weights = {replicas: trained(make, optimizer, replicas, 5, 21)[1] for replicas in (None, 1, 8)}
    for other in (None, 1):
        distance = np.linalg.norm(weights[8] - weights[other]) / np.linalg.norm(weights[other])
        assert distance <= tolerance, other
