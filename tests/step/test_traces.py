"""How often the code of a replica is traced until the first step: tracing a large model takes seconds."""

import keras
import pytest
from keras import layers

from trainings import on, rows

X, Y = rows(8, 5), rows(8, 3)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_replica_is_traced_for_its_loss_divisors_and_for_its_contribution(devices):
    """The shapes of a contribution, and the random numbers in it, are those of the trace that the step program takes."""
    traces = []

    class Noting(layers.Dense):
        def call(self, x):
            traces.append(len(x))
            return super().call(x)

    with on(devices, 2).scope():
        model = keras.Sequential([layers.Input((5,)), Noting(3)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert traces.count(2) == 2
