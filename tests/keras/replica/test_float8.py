"""Training in float8, whose scales and histories of largest values are overwritten by their gradients."""

from __future__ import annotations

import jax
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


def in_a_loop(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = quantized()
        loss = keras.losses.MeanSquaredError(reduction=None)

    def step(batch):
        x, y = batch
        _, gradients = un.value_and_grad(lambda: loss(y, model(x, training=True)), model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    for _ in range(EPOCHS):
        for batch in strategy.distribute_dataset((X, Y), batch_size=BATCH):
            strategy.run(step, args=(batch,))
    return model


@pytest.mark.slow
def test_a_loop_of_the_users_own():
    one, three = in_a_loop(on(1, 4)), in_a_loop(on(3, 4))
    assert un.fingerprint(one) == un.fingerprint(three)
    for name, value in overwritten(run(quantized, FIT).model).items():
        np.testing.assert_allclose(overwritten(one)[name], value, rtol=1e-3, err_msg=name)


def test_the_first_values_are_exact():
    """Nothing is rounded by them yet: the largest value of a batch is the largest of its shards, and gradients are of one global loss."""
    fit = fitting(X[:BATCH], Y[:BATCH], batch_size=BATCH)
    theirs, found = overwritten(run(quantized, fit).model), overwritten(run(quantized, fit, on(1)).model)
    for name, value in theirs.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_other_layers_of_float8():
    def einsum():
        stack = (
            layers.Reshape((5, 1)),
            layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"),
            layers.Flatten(),
            layers.Dense(2),
        )
        model = in_float8(keras.Sequential([keras.Input((5,)), *stack]))
        model.compile(keras.optimizers.SGD(0.02), "mse")
        return model

    ours, plain = assert_same_bits(einsum, FIT, replicas=4), run(einsum, FIT)
    for mine, value in zip(overwritten(ours.model).values(), overwritten(plain.model).values(), strict=True):
        np.testing.assert_allclose(mine, value, rtol=1e-2)


class OwnStep(keras.Sequential):
    """With a train_step of its own, whose loss is the mean over its rows."""

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y = data

        def loss_of(trainable):
            predictions, new = self.stateless_call(trainable, others, x, training=True)
            return ops.mean(ops.square(predictions - y)), new

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, others, slots, metrics)


@pytest.mark.slow
def test_scales_in_a_step_of_the_models_own():
    """They are those of the whole batch, as in Keras."""
    make, fit = (lambda: quantized(OwnStep)), fitting(X[:-1], Y[:-1], batch_size=BATCH)
    theirs, found = overwritten(run(make, fit).model), overwritten(assert_same_bits(make, fit, cases((3,), (1, 3)), 4).model)
    for name, value in theirs.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-2, err_msg=name)


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
