"""A pipeline for each replica: rows, numbers of replicas, and bits."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from loops import Loop, crossentropy, data
from sizes import cases, slow
from trainings import on

X, Y = data("dense", 43)
FEW, SIZE = (X[:20], Y[:20]), 8
"""Batches in which each of eight replicas has one row or none, which is one program."""


def trained_on(source, strategy):
    loop = Loop(strategy)
    dataset = source(strategy)
    for _ in range(2):
        loop.whole_epoch(dataset)
    return loop.train(X, Y, epochs=0)


def pipelines(strategy, rows, size, drop=False):
    def of_replica(context):
        mine = rows[context.input_pipeline_id :: context.num_input_pipelines]
        stop = len(mine) // size * size if drop else len(mine)
        return [mine[start : start + size] for start in range(0, stop, size)]

    return strategy.distribute_datasets_from_function(of_replica)


def test_a_pipeline_for_each_replica():
    """The second one ends first."""
    found = [[part.tolist() for part in batch.values] for batch in pipelines(on(1, 2), np.arange(9), 2)]
    assert found == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8], []]]
    dropped = pipelines(on(2, 2), np.arange(9), 2, drop=True)
    assert [[part.tolist() for part in batch.values] for batch in dropped] == found[:2]
    assert len(dropped) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 0, 3, 2), *slow(((0, 2, 2, 0),), ((3, 3, 0, 1),), ((0, 0, 0, 4),))])
def test_rows_that_were_dealt_out_train_to_the_same_bits(sizes):
    """Whatever the number of rows of each replica, none among them, on one device and on several, in a loop and in fit."""

    def dataset(strategy):
        ends = np.cumsum((0, *sizes))

        def of_replica(context):
            rows = slice(ends[context.input_pipeline_id], ends[context.input_pipeline_id + 1])
            return [(X[rows], Y[rows])] * 2 if rows.stop > rows.start else []

        return strategy.distribute_datasets_from_function(of_replica)

    seen = {trained_on(dataset, on(devices, 4)) for devices in cases((1, 3), (1, 2, 3, 4))}
    for devices in cases((1,), (1, 3)):
        keras.utils.set_random_seed(0)
        loop = Loop(on(devices, 4))
        loop.model.compile(loop.optimizer, crossentropy())
        loop.model.fit(dataset(loop.strategy), epochs=2, verbose=0)
        seen.add(loop.train(X, Y, epochs=0))
    assert len(seen) == 1


@pytest.mark.parametrize("sizes", [(0, 2, 2, 2), *slow(((0, 0, 1, 1),), ((0, 3, 0, 0),), ((1, 0, 1, 1),))])
def test_a_replica_keeps_its_number_whichever_replicas_have_rows(sizes):
    """It draws the random numbers of its number, in fit and in a loop, also where it is the first with rows."""
    ends = np.cumsum((0, *sizes))

    def of_replica(context):
        rows = slice(ends[context.input_pipeline_id], ends[context.input_pipeline_id + 1])
        return [(X[rows], Y[rows])] * 2 if rows.stop > rows.start else []

    def train(devices):
        keras.utils.set_random_seed(0)
        strategy = on(devices, 4)
        with strategy.scope():
            model = keras.Sequential([layers.Dropout(0.5), layers.Dense(5)])
        model.compile("sgd", crossentropy())
        dataset = strategy.distribute_datasets_from_function(of_replica)
        model.fit(dataset, verbose=0)
        number = lambda x, y: un.get_replica_context().replica_id_in_sync_group + 0 * keras.ops.cast(y[:1], "int32")
        numbers = [strategy.gather(strategy.run(number, args=batch), axis=0).tolist() for batch in dataset]
        return un.fingerprint(model), numbers

    found = [train(devices) for devices in cases((1, 3), (1, 2, 4))]
    assert found == found[:1] * len(found)
    assert found[0][1] == [[replica for replica, size in enumerate(sizes) if size]] * 2


class Steps(layers.Layer):
    """Counts steps, and draws random numbers."""

    def __init__(self, growth=1):
        super().__init__()
        self.growth = growth
        self.seeds = keras.random.SeedGenerator(1)
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")

    def call(self, x):
        self.steps.assign(self.steps + self.growth)
        return x + keras.random.normal((), seed=self.seeds)


@pytest.mark.parametrize("devices", [3, *slow(1)])
def test_state_moves_on_where_the_first_replica_has_no_rows_left(devices):
    def of_replica(context):
        me = context.input_pipeline_id
        return [(X[2 * me : 2 * me + 2], Y[2 * me : 2 * me + 2])] * (4 if me else 1)

    strategy = on(devices, 3)
    with strategy.scope():
        model = keras.Sequential([Steps(), layers.Dense(5)])
    model.compile("sgd", crossentropy())
    model.fit(strategy.distribute_datasets_from_function(of_replica), verbose=0)
    assert int(model.layers[0].steps.value) == 4
    assert np.asarray(model.layers[0].seeds.state.value).tolist() == [1, 4]


def test_a_large_growth_of_an_integer_is_that_of_one_replica():
    """The sum over replicas has more than 32 bits."""
    strategy = on(1, 4)
    with strategy.scope():
        model = keras.Sequential([Steps(growth=1_000_000_007), layers.Dense(5)])
    model.compile("sgd", crossentropy())
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert int(model.layers[0].steps.value) == 1_000_000_007


def test_sizes_of_replicas():
    sizes = []
    on(1, 4).distribute_datasets_from_function(lambda context: sizes.append(context.get_per_replica_batch_size(12)) or [X])
    assert sizes == [3, 3, 3, 3]
    with pytest.raises(ValueError, match=r"12 rows cannot be dealt out evenly to 5 replicas.*strategy.distribute_dataset"):
        on(1, 5).distribute_datasets_from_function(lambda context: [context.get_per_replica_batch_size(12)])
    with pytest.raises(ValueError, match="It must return a replica's batches"):
        on(1, 2).distribute_datasets_from_function(lambda context: (X, Y))
