"""What the suites of others test of custom loops, in ours."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import Loop, crossentropy, data, normalized
from sizes import slow
from trainings import distance, on

X, Y = data("dense", 66)


def trained(how, devices, optimizer):
    """(the loss of each batch, the accuracy, the bits) of 66 rows in batches of 32."""
    loop = Loop(on(devices, 4), normalized, optimizer, batch_size=32)
    dataset = loop.strategy.distribute_dataset((X, Y), batch_size=32)
    if how == "epoch in a function":
        losses = float(loop.whole_epoch(dataset))
    else:
        step, losses = (loop.one if "outside" in how else loop.compiled), 0.0
        batches = iter(dataset) if "iterator" in how else None
        for batch in dataset if batches is None else (next(batches) for _ in range(len(dataset))):
            losses += step(batch)
        losses = float(losses)
    return losses, float(loop.accuracy.result()), un.fingerprint(loop.model, loop.optimizer)


def fitted(devices, optimizer):
    loop = Loop(on(devices, 4), normalized, optimizer)
    loop.model.compile(loop.optimizer, crossentropy(), metrics=["accuracy"])
    history = loop.model.fit(X, Y, batch_size=32, shuffle=False, verbose=0).history
    return history["accuracy"][0], un.fingerprint(
        loop.model.trainable_variables, loop.model.non_trainable_variables, loop.optimizer
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [keras.optimizers.Adagrad, keras.optimizers.Nadam])
def test_every_shape_of_loop_has_one_loss_one_accuracy_and_the_bits_of_fit(optimizer):
    shapes = ["for, outside", "for, inside", "iterator, outside", "iterator, inside", "epoch in a function"]
    found = {trained(how, devices, optimizer) for how, devices in zip(shapes, (1, 2, 3, 4, 1), strict=True)}
    assert len(found) == 1
    ((_, accuracy, _),) = found
    assert fitted(2, optimizer)[0] == pytest.approx(accuracy, abs=1e-7)


def test_layers_that_cross_batches_are_refused_in_a_loop_too():
    model = lambda: keras.Sequential([layers.Input((3, 6), batch_size=3), layers.LSTM(3, stateful=True)])
    loop = Loop(on(1, 4), model)
    (batch,) = loop.strategy.distribute_dataset([np.ones((12, 3, 6), "float32")])
    with pytest.raises(ValueError, match="stateful: it carries a state"):
        loop.strategy.run(lambda batch: loop.model(batch), args=(batch,))


class Centered(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


@pytest.mark.parametrize("layer", [layers.BatchNormalization, Centered])
def test_synchronized_layers_see_the_batch_in_a_loop_too(layer):
    def model():
        made = keras.Sequential([layers.Input((6,)), layers.Dense(8), layer(), layers.Dense(5)])
        made.layers[1].synchronized = True  # the constructor of Keras' layer refuses it on JAX already
        return made

    def train(devices, replicas):
        loop = Loop(on(devices, replicas), model, lambda: keras.optimizers.SGD(0.1))
        loop.train(X, Y, epochs=1)
        return loop.model

    models = [train(1, 4), train(2, 4)]
    assert un.fingerprint(models[0]) == un.fingerprint(models[1])
    assert distance(models[0], train(1, 1)) < 1e-6


@pytest.mark.parametrize("op", [un.ReduceOp.MEAN, "sum", *slow("MEAN", "mean", un.ReduceOp.SUM)])
@pytest.mark.parametrize("inside", [True, False])
def test_reduce_by_name_and_by_value_in_a_scope_and_outside(op, inside):
    strategy = on(2, 4)
    (batch,) = strategy.distribute_dataset([np.arange(10, dtype="float32")])
    rows = strategy.run(lambda rows: rows * 1, args=(batch,))
    is_mean = getattr(op, "name", op).upper() == "MEAN"
    if inside:
        with strategy.scope():
            total, of_host = strategy.reduce(op, rows, axis=0), strategy.reduce("MEAN", 3.0)
    else:
        total, of_host = strategy.reduce(op, rows, axis=0), strategy.reduce("MEAN", 3.0)
    assert float(total) == (4.5 if is_mean else 45)
    assert of_host == 3.0


@pytest.mark.parametrize("eager", [True, *slow(False)])
def test_values_of_rows_go_into_the_next_run(eager):
    """Replicas have three rows and two; metrics see those of all."""
    strategy, x = on(2, 4), np.arange(10, dtype="float32")
    with strategy.scope():
        largest = keras.metrics.Mean()

    @un.function(eager=eager)
    def step(batch):
        doubled, counted = strategy.run(lambda rows: (2 * rows, ops.sum(rows)), args=(batch,))

        def add(rows, doubled, counted):
            largest.update_state(ops.max(rows + doubled))
            return ops.sum(rows + doubled) + counted

        return strategy.reduce("SUM", strategy.run(add, args=(batch, doubled, counted)), axis=None)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not compiled")
        (total,) = map(step, strategy.distribute_dataset([x]))
    assert (float(total), float(largest.result())) == (4 * x.sum(), 3 * x.max())


def test_double_precision_stays():
    """Of numbers, where JAX has it: gradients are summed in float32, and such models refused."""
    with jax.enable_x64(True):
        strategy, thirds = on(2, 4), np.arange(12) / 3
        (batch,) = strategy.distribute_dataset([thirds])
        share = strategy.run(un.compute_average_loss, args=(batch,))
        mean = strategy.reduce("SUM", share)
        assert mean.dtype == "float64"
        np.testing.assert_allclose(mean, thirds.mean(), rtol=1e-15)


@pytest.mark.parametrize("shape", [(7,), (4, 3), (1, 2, 3, 1)])
def test_weights_of_another_shape_are_refused(shape):
    strategy = on(1, 4)
    (batch,) = strategy.distribute_dataset([np.ones((12, 2), "float32")])
    with pytest.raises(ValueError, match=r"sample_weight has the shape .*does not fit"):
        strategy.run(lambda rows: un.compute_average_loss(rows, sample_weight=ops.ones(shape)), args=(batch,))


def test_losses_that_a_layer_used_twice_adds_and_two_outputs_sum_up_to_the_whole():
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(ops.square(x)))
            return x

    def model():
        keras.utils.set_random_seed(0)
        adds, inputs = Adds(), layers.Input((6,))
        hidden = adds(layers.Dense(6, "tanh", kernel_regularizer="l2")(inputs))
        return keras.Model(inputs, {"one": layers.Dense(1)(hidden), "other": layers.Dense(1)(adds(hidden))})

    options = {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}
    with on(1, 4).scope():
        mine = model()
    plain = model()
    for each in (mine, plain):
        each.compile(**options | {"optimizer": keras.optimizers.SGD(0.0)})
    y = {"one": X[:64, :1], "other": X[:64, 1:2]}
    logs, expected = (each.evaluate(X[:64], y, batch_size=64, verbose=0, return_dict=True) for each in (mine, plain))
    terms = lambda found: found["loss"] - found["one_loss"] - found["other_loss"]
    assert terms(expected) > 0.05
    np.testing.assert_allclose(terms(logs), terms(expected), rtol=1e-5)
    np.testing.assert_allclose([logs[name] for name in sorted(logs)], [expected[name] for name in sorted(logs)], rtol=1e-6)


def test_a_metric_is_updated_in_replica_code_and_outside():
    strategy = on(2, 4)
    with strategy.scope():
        mean = keras.metrics.Mean()
    (batch,) = strategy.distribute_dataset([np.arange(10, dtype="float32")])
    mean.update_state(100.0)
    strategy.run(mean.update_state, args=(batch,))
    mean.update_state([0.0])
    assert float(mean.result()) == pytest.approx(145 / 12)
