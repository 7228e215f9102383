"""Training in float8, whose scales and histories of largest values are overwritten by their gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import loops
import unisono as un
from sizes import BATCH, ROWS, cases, slow
from trainings import assert_same_bits, fitting, on, rows, run

X, Y = 3 * rows(ROWS, 5), rows(ROWS, 2, seed=1)
EPOCHS = cases(2, 4)
FIT = fitting(X, Y, batch_size=BATCH, epochs=EPOCHS)


def quantized(model=keras.Sequential):
    model = in_float8(model([keras.Input((5,)), layers.Dense(8, "relu", name="first"), layers.Dense(2, name="last")]))
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def in_float8(model):
    for layer in model.layers:
        if isinstance(layer, layers.Dense | layers.EinsumDense):
            layer.quantize("float8")
    return model


def overwritten(model):
    return {v.path.partition("/")[2]: np.asarray(v.value) for v in model.trainable_variables if v.overwrite_with_gradient}


@pytest.mark.parametrize("replicas", [4, *slow(8, 1)])
def test_scales_are_those_of_the_whole_batch(replicas):
    """Every replica quantizes by the same scales, and the largest value over replicas is that of the batch: so little but rounding differs,
    where a sum over replicas would let scales explode."""
    plain = run(quantized, FIT)
    ours = assert_same_bits(quantized, FIT, devices=cases((3,), (1, 3)) if replicas > 1 else (1,), replicas=replicas)
    theirs, found = overwritten(plain.model), overwritten(ours.model)
    assert found.keys() == theirs.keys()
    assert len(found) == 12
    for name, value in theirs.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(ours.logs["loss"], plain.logs["loss"], rtol=1e-3)


def test_the_first_values_are_exact():
    """Nothing is rounded by them yet: the largest value of a batch is the largest of its shards, and gradients are of one global loss."""
    fit = fitting(X[:BATCH], Y[:BATCH], batch_size=BATCH)
    theirs, found = overwritten(run(quantized, fit).model), overwritten(run(quantized, fit, on(1)).model)
    for name, value in theirs.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("precision", slow("mixed_float16", "float32"))
def test_a_loop_has_the_bits_of_fit(precision):
    """A loss scale leaves what is no gradient alone, in the loop as in Keras' optimizer."""

    def make():
        model = loops.dense()
        model.build((None, 6))
        return in_float8(model)

    def optimizer():
        adam = keras.optimizers.Adam()
        return adam if precision == "float32" else keras.optimizers.LossScaleOptimizer(adam, initial_scale=64)

    x, y = loops.data("dense", 27)
    with loops.policy(precision):
        by_fit = loops.by_fit(on(2), make, optimizer, x, y, BATCH)
        assert loops.Loop(on(1), make, optimizer, "vector", BATCH).train(x, y) == by_fit


class Largest(layers.Layer):
    """A layer of a user's: a variable becomes minus the largest values of all rows, through its gradient."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(2,), initializer="ones", overwrite_with_gradient=True, name="largest")

    def call(self, x):
        @ops.custom_gradient
        def noted(x, largest):
            new = -ops.max(x, axis=0)[:2]
            return x, lambda *args, upstream=None: (args[0] if upstream is None else upstream, new)

        return noted(x, ops.convert_to_tensor(self.largest))


@pytest.mark.parametrize("sizes", [(1, 0, 3, 2), *slow(((0, 2, 2, 0),), ((3, 3, 0, 1),))])
def test_the_largest_is_that_of_all_rows(sizes):
    """Of numbers less than zero, where zeros stand for replicas without rows; those may be in the middle."""
    ends, x = np.cumsum((0, *sizes)), np.abs(X[:7]) + 1

    def fit(model):
        def of_replica(context):
            rows = slice(ends[context.input_pipeline_id], ends[context.input_pipeline_id + 1])
            return [(x[rows], Y[:7][rows])] if rows.stop > rows.start else []

        return model.fit(un.get_strategy().distribute_datasets_from_function(of_replica), verbose=0)

    def make():
        model = keras.Sequential([keras.Input((5,)), Largest(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    expected = -x[: ends[-1]].max(axis=0)[:2]
    for devices in (1, 3):
        strategy = on(devices, 4)
        with strategy.scope():
            model = make()
            fit(model)
        np.testing.assert_array_equal(model.layers[0].largest.value, expected)
