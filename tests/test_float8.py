"""Training in float8, whose scales and histories of largest values are overwritten by their gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import BATCH, ROWS, slow
from trainings import assert_same_bits, fitting, on, rows, run

X, Y = 3 * rows(ROWS, 5), rows(ROWS, 2, seed=1)
FIT = fitting(X, Y, batch_size=BATCH, epochs=4)


def quantized():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "relu", name="first"), layers.Dense(2, name="last")])
    for layer in model.layers:
        layer.quantize("float8")
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def overwritten(model):
    return {v.path.partition("/")[2]: np.asarray(v.value) for v in model.trainable_variables if v.overwrite_with_gradient}


@pytest.mark.parametrize("replicas", [4, *slow(8, 1)])
def test_scales_are_those_of_the_whole_batch(replicas):
    """Every replica quantizes by the same scales, and the largest value over replicas is that of the batch: so little but rounding differs,
    where a sum over replicas would let scales explode."""
    plain = run(quantized, FIT)
    ours = assert_same_bits(quantized, FIT, devices=(1, 3) if replicas > 1 else (1,), replicas=replicas)
    theirs, found = overwritten(plain.model), overwritten(ours.model)
    assert found.keys() == theirs.keys()
    assert len(found) == 12
    for name, value in theirs.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(ours.logs["loss"], plain.logs["loss"], rtol=1e-3)


def in_a_loop(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = quantized()
        loss = keras.losses.MeanSquaredError(reduction=None)

    def step(batch):
        x, y = batch
        _, gradients = un.value_and_grad(lambda: loss(y, model(x, training=True)), model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    for _ in range(4):
        for batch in strategy.distribute_dataset((X, Y), batch_size=BATCH):
            strategy.run(step, args=(batch,))
    return model


def test_a_loop_of_the_users_own():
    one, three = in_a_loop(on(1, 4)), in_a_loop(on(3, 4))
    assert un.fingerprint(one) == un.fingerprint(three)
    for name, value in overwritten(run(quantized, FIT).model).items():
        np.testing.assert_allclose(overwritten(one)[name], value, rtol=1e-3, err_msg=name)
