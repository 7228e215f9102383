"""Batches that cannot be cut into rows, in loops: one replica takes them whole."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import unisono as un
from graph_net import GraphNet, draw_graphs
from sizes import slow
from trainings import on
from unisono._src.engine.state import get_step_count
from unisono._src.keras.record.run_recorder import get_recorder
from unisono._src.tools.records import read_run_record


def graphs(passes=1):
    """Batches of graphs; the second has as many nodes as graphs."""
    return draw_graphs(((8, 3), (3, 3), (11, 3), (5, 2)), passes)


class Training:
    def __init__(self, strategy):
        keras.utils.set_random_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model, self.optimizer = GraphNet(), keras.optimizers.Adam(0.01)
            self.mean = keras.metrics.Mean()

    def step(self, batch):
        x, y = batch

        def loss():
            return un.compute_average_loss(keras.losses.mean_squared_error(y, self.model(x, training=True)))

        value, gradients = un.value_and_grad(loss, self.model.trainable_variables)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.mean.update_state(value)
        return value

    def train(self, dataset, run=None):
        run = run or (lambda batch: self.strategy.run(self.step, args=(batch,)))
        return [float(self.strategy.reduce("SUM", run(batch), axis=None)) for batch in dataset]

    @property
    def bits(self):
        return un.fingerprint(self.model.trainable_variables, self.optimizer)


@functools.cache
def fit_graphs():
    keras.utils.set_random_seed(0)
    with on(1, 1).scope():
        model = GraphNet()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(graphs(2), steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)
    return un.fingerprint(model.trainable_variables, model.optimizer)


def from_function(strategy):
    return strategy.distribute_datasets_from_function(lambda context: list(graphs(2)))


@pytest.mark.parametrize("how", ["list", "function", *slow("generator", "compiled")])
def test_a_loop_over_graphs_has_the_bits_of_fit(how):
    training = Training(on(1, 1))
    strategy = training.strategy
    dataset = (
        from_function(strategy)
        if how == "function"
        else strategy.distribute_dataset(graphs(2) if how == "generator" else list(graphs(2)))
    )
    step = un.function(lambda batch: strategy.run(training.step, args=(batch,))) if how == "compiled" else None
    losses = training.train(dataset, step)
    assert training.bits == fit_graphs()
    assert float(training.mean.result()) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.slow
def test_a_step_that_is_not_compiled():
    compiled, eager = Training(on(1, 1)), Training(on(1, 1))
    batches = list(graphs())[:1] * 2
    expected = compiled.train(compiled.strategy.distribute_dataset(batches))
    step = un.function(lambda batch: eager.strategy.run(eager.step, args=(batch,)), eager=True)
    with pytest.warns(UserWarning, match="'step' is not compiled"):
        found = eager.train(eager.strategy.distribute_dataset(batches), step)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_what_replicas_return_is_as_long_as_it_is():
    strategy = on(1, 1)
    for batch in strategy.distribute_dataset(list(graphs())[:2]):
        nodes, count = (leaf.shape[0] for leaf in (batch[0]["nodes"], batch[1]))
        assert strategy.local_results(batch)[0][0]["nodes"].shape == (nodes, 5)
        doubled, size = strategy.run(lambda batch: (2 * batch[0]["nodes"], ops.shape(batch[1])[0] * ops.ones(())), args=(batch,))
        assert strategy.gather(doubled, axis=0).shape == (nodes, 5)
        again = strategy.run(lambda batch, values: ops.sum(values - 2 * batch[0]["nodes"]), args=(batch, doubled))
        assert float(strategy.reduce("SUM", again, axis=None)) == 0
        assert float(strategy.reduce("SUM", size, axis=None)) == count


def test_batches_of_two_datasets_and_a_number():
    strategy = on(1, 1)
    rows = strategy.distribute_dataset((np.arange(6.0),), batch_size=3)
    others = strategy.distribute_dataset([(np.ones((4, 2)), np.float32(3))] * 2)
    step = lambda one, other: ops.sum(one[0]) + ops.sum(other[0]) * other[1]
    found = [float(strategy.reduce("SUM", strategy.run(step, args=pair), axis=None)) for pair in zip(rows, others, strict=True)]
    assert found == [27.0, 36.0]


@pytest.fixture
def recorder():
    before, get_step_count().steps = get_step_count().steps, 0
    yield
    get_recorder().stop()
    get_step_count().steps = before


@pytest.mark.usefixtures("recorder")
def test_a_loop_goes_on_and_is_recorded(tmp_path):
    def begin():
        training = Training(on(1, 1))
        training.model(next(graphs())[0])
        dataset = training.strategy.distribute_dataset(list(graphs())[:3])
        checkpoint = un.Checkpoint(model=training.model, optimizer=training.optimizer, dataset=dataset)
        step = un.function(lambda batch: training.strategy.run(training.step, args=(batch,)), record=tmp_path / "record")
        return training, dataset, checkpoint, step

    training, dataset, checkpoint, step = begin()
    for number, batch in enumerate(dataset):
        step(batch)
        if number == 1:
            checkpoint.save(str(tmp_path / "saved"))
    resumed, rest, checkpoint, _ = begin()
    checkpoint.restore(un.latest_checkpoint(str(tmp_path)))
    assert len(resumed.train(rest)) == 1
    assert resumed.bits == training.bits
    get_recorder().stop()  # which writes the last steps
    assert [step.rows for step in read_run_record(tmp_path / "record").steps.values()] == [8, 3, 11]


def test_several_replicas_refuse_them():
    with pytest.raises(ValueError, match=r"Batch 0 holds arrays of .*With replicas=1 such a batch is taken whole"):
        next(iter(on(1, 2).distribute_dataset(list(graphs()))))
