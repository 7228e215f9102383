"""How often a model is traced until the first step: tracing a large one takes seconds."""

import keras
import pytest
from keras import layers

from trainings import on, rows

X, Y = rows(8, 5), rows(8, 3)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_is_traced_for_the_batch_and_for_a_shard(devices):
    """Once each, after Keras has built what is compiled: shards of other sizes follow from these two."""
    traces = []

    class Noting(layers.Dense):
        def call(self, x):
            traces.append(len(x))
            return super().call(x)

    with on(devices, 2).scope():
        model = keras.Sequential([layers.Input((5,)), Noting(3)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert traces == [4, 4, 2]
