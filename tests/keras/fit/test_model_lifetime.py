"""A trained model is garbage when the program drops it, and its machine code with it: a process may have only so much of that."""

import gc
import weakref

import keras
from keras import layers, ops

from trainings import on, rows


class NormLoss(keras.losses.Loss):
    """The first step tries how it grows with the rows."""

    def call(self, y, y_pred):
        return ops.sqrt(ops.sum(ops.square(y - y_pred), axis=-1))


class Extra(layers.Layer):
    """Adds a loss of its own, which the first step tries as well."""

    def call(self, x):
        self.add_loss(1e-3 * ops.sum(ops.square(x)))
        return x


def test_a_trained_model_can_be_let_go():
    """JAX keeps what it has traced. Where a first step compares numbers, its traces hold callbacks."""
    with on(1, 4).scope():
        model = keras.Sequential([layers.Dense(4), Extra(), layers.Dense(1)])
    model.compile("sgd", NormLoss(), metrics=["mae", keras.metrics.MeanSquaredError()])
    model.fit(rows(8, 3), rows(8, 1), batch_size=8, verbose=0)
    alive = [weakref.ref(thing) for thing in (model, *model.metrics, model.optimizer)]
    del model
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)
