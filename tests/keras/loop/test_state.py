"""Variables in a loop: how those of one's own are merged, who owns their arrays, and layers that look at the batch."""

import gc
import weakref

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, bits, data
from sizes import slow
from trainings import distance, on

X, Y = data("dense", 43)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("aggregation", "grown"), [("sum", 24), ("only_first_replica", 24), ("mean", 6)])
def test_variables_of_ones_own_are_merged_as_they_say(replicas, aggregation, grown):
    strategy = on(min(2, replicas), replicas)
    with strategy.scope():
        numbers = [
            keras.Variable(0, dtype=dtype, trainable=False, aggregation=aggregation)
            for dtype in ("float32", "int32")
            if (aggregation, dtype) != ("mean", "int32")
        ]

    def code(rows):
        for number in numbers:
            number.assign_add(len(rows))

    for batch in strategy.distribute_dataset(np.arange(24.0), batch_size=12):
        strategy.run(code, args=(batch,))
    assert [float(number.value) for number in numbers] == [grown if replicas > 1 else 24] * len(numbers)


@pytest.mark.parametrize(("replicas", "dtype"), [(4, "float32"), (4, "int32"), *slow((1, "float32"))])
def test_what_replicas_assign_to_a_sum_is_added(replicas, dtype):
    """In place of the value before, which the code does not read; from then on it grows."""
    strategy = on(min(2, replicas), replicas)
    with strategy.scope():
        number = keras.Variable(7, dtype=dtype, trainable=False, aggregation="sum")

    def code(rows):
        number.assign(ops.sum(rows))
        number.assign_add(ops.cast(len(rows), dtype))

    for batch in strategy.distribute_dataset(np.arange(16, dtype=dtype), batch_size=8):
        strategy.run(code, args=(batch,))
    assert float(number.value) == sum(range(8, 16)) + 8


@pytest.mark.parametrize(("replicas", "aggregation"), [(4, "mean"), (4, "only_first_replica"), (1, "mean")])
@pytest.mark.parametrize("start", [np.inf, np.nan])
def test_state_may_begin_at_no_number(replicas, aggregation, start):
    strategy = on(min(2, replicas), replicas)
    with strategy.scope():
        last = keras.Variable(start, trainable=False, aggregation=aggregation)

    def code(rows):
        last.assign(ops.where(ops.isfinite(last), ops.minimum(last, 2.0), 3.0 + 0 * ops.sum(rows)))

    seen = []
    for batch in strategy.distribute_dataset(np.ones(24, "float32"), batch_size=12):
        strategy.run(code, args=(batch,))
        seen.append(float(last.value))
    assert seen == [3, 2]


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_arrays_of_the_user_are_not_used_again(replicas):
    """What was assigned, and what a variable gave while another function owned the state."""
    loop = Loop(on(1, replicas))
    loop.one(loop.first())
    kernel = loop.model.trainable_variables[0]
    mine = jax.numpy.asarray(np.ones(kernel.shape, "float32"))
    kernel.assign(mine)
    loop.one(loop.first())
    held = kernel.value
    before = np.array(held)
    loop.run(lambda batch: ops.sum(loop.model(batch[0])))
    for _ in range(2):
        loop.one(loop.first())
    np.testing.assert_array_equal(mine, np.ones(kernel.shape))
    np.testing.assert_array_equal(held, before)


def test_a_call_that_fails_leaves_the_state_as_it_is():
    """Also where another function has changed it since this one's last call."""
    loop = Loop(on(2, 4))
    batch, kernel = loop.first(), loop.model.trainable_variables[0]

    def look(batch, number):
        return ops.sum(loop.model(batch[0])) + number

    loop.strategy.run(look, args=(batch, np.float32(1)))
    loop.one(batch)
    before = np.array(kernel.value)
    with pytest.raises(ValueError, match="made of a generator|different global batches"):
        loop.strategy.run(look, args=((batch[0], loop.first(batch_size=5)[0]), np.float32(1)))
    loop.optimizer.lr = 0.1
    with pytest.raises(AttributeError, match="learning_rate"):
        loop.one(batch)
    np.testing.assert_array_equal(kernel.value, before)


def test_memory_of_the_state_is_used_again():
    loop = Loop(on(1, 4))
    kernel, batch, places = loop.model.trainable_variables[0], loop.first(), set()
    loop.one(batch)
    for _ in range(5):
        loop.one(batch)
        places.add(kernel.value.unsafe_buffer_pointer())
    assert len(places) == 1


@pytest.mark.slow
def test_a_strategy_and_its_programs_can_be_let_go():
    loop = Loop(on(1, 2))
    loop.train(X, Y)
    alive = weakref.ref(loop.model)
    del loop
    gc.collect()
    assert alive() is None


def unbuilt():
    return keras.Sequential([layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dense(CLASSES)])


def test_a_network_that_is_built_by_its_first_step():
    def train(built):
        loop = Loop(on(2, 4), unbuilt)
        if built:
            loop.model.build((None, 6))
        for batch in loop.strategy.distribute_dataset((X[:24], Y[:24]), batch_size=12):
            loop.one(batch)
        return bits(loop.model, loop.optimizer)

    assert train(built=False) == train(built=True)


class Centered(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


@pytest.mark.parametrize("layer", [layers.BatchNormalization, Centered])
def test_layers_that_look_at_the_batch_see_all_of_it(layer):
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


@pytest.mark.parametrize("momentum", [0.8, *slow(0.99)])
def test_moving_statistics_follow_all_rows(momentum):
    """The moving mean moves as if the mean were that of all rows."""
    strategy = on(3, 4)
    with strategy.scope():
        layer = layers.BatchNormalization(momentum=momentum)
        layer.build((None, 6))
    expected = np.zeros(6)
    for batch in strategy.distribute_dataset(X, batch_size=12):
        rows = np.concatenate(batch.values)
        strategy.run(lambda batch: layer(batch, training=True), args=(batch,))
        expected = expected * momentum + rows.mean(0) * (1 - momentum)
    np.testing.assert_allclose(layer.moving_mean.value, expected, rtol=1e-4, atol=1e-6)


def test_layers_that_cross_batches_are_refused():
    model = lambda: keras.Sequential([layers.Input((3, 6), batch_size=3), layers.LSTM(3, stateful=True)])
    loop = Loop(on(1, 4), model)
    (batch,) = loop.strategy.distribute_dataset([np.ones((12, 3, 6), "float32")])
    with pytest.raises(ValueError, match="stateful: it carries a state"):
        loop.strategy.run(lambda batch: loop.model(batch), args=(batch,))
