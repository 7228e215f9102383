"""Batches that cannot be cut into rows: one replica takes them whole, as plain Keras does."""

import math
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from graph_net import GraphNet, draw_graphs
from sizes import cases, slow
from trainings import assert_close_logs, on, run
from unisono._src.tools.records import read_run_record

SHAPES = cases(((8, 3), (5, 2)), ((8, 3), (11, 3), (5, 2)))
"""Nodes and graphs of each batch of a pass: each is a program."""


class OwnStep(GraphNet):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"graphs": ops.cast(ops.shape(data[1])[0], "float32")}, state


def graphs(passes=100):
    """Batches of graphs, with a weight for each graph."""
    for inputs, targets in draw_graphs(SHAPES, passes):
        yield inputs, targets, np.arange(1.0, len(targets) + 1)


def compiled(kind=GraphNet, **options):
    def make():
        model = kind()
        weighted = [keras.metrics.MeanSquaredError(name="weighted")]
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=weighted, **options)
        return model

    return make


def fit_graphs(model, **more):
    return model.fit(graphs(), steps_per_epoch=6, epochs=2, verbose=0, shuffle=False, **more)


@pytest.mark.parametrize("kind", [GraphNet, *slow(OwnStep)])
def test_graphs_train_as_in_keras(kind):
    """Losses, validation and predictions too; the batches of an epoch are weighed as Keras does, by their nodes."""
    fit = lambda model: fit_graphs(model, validation_data=graphs(), validation_steps=3)
    plain, ours = run(compiled(kind), fit), run(compiled(kind), fit, on(1, 1))
    assert_close_logs(ours.logs, plain.logs)
    batch = next(graphs())
    for method, data in (("predict_on_batch", batch[:1]), ("test_on_batch", batch), ("train_on_batch", batch)):
        theirs, found = (getattr(one.model, method)(*data) for one in (plain, ours))
        np.testing.assert_allclose(found, theirs, rtol=1e-4)
    theirs, found = (one.model.predict(graphs(), steps=3, verbose=0) for one in (plain, ours))
    assert found.shape == (8, 1)
    np.testing.assert_allclose(found, theirs, rtol=1e-4)


def test_steps_of_ones_own_train_as_in_keras():
    fit = lambda model: model.fit(graphs(), steps_per_epoch=3, verbose=0, shuffle=False)
    plain, ours = run(compiled(OwnStep), fit), run(compiled(OwnStep), fit, on(1, 1))
    assert_close_logs(ours.logs, plain.logs)


@pytest.mark.slow
def test_steps_in_a_call_and_a_record_change_no_bit(tmp_path):
    plain = run(compiled(), fit_graphs, on(1, 1)).model
    recorded = lambda model: fit_graphs(model, callbacks=[un.callbacks.Record(tmp_path)])
    others = [run(compiled(steps_per_execution=3), fit_graphs, on(1, 1)).model, run(compiled(), recorded, on(1, 1)).model]
    assert {un.fingerprint(model) for model in others} == {un.fingerprint(plain)}
    assert [step.rows for step in read_run_record(tmp_path).steps.values()][:4] == [
        SHAPES[step % len(SHAPES)][0] for step in range(4)
    ]


@pytest.mark.slow
def test_steps_that_are_not_compiled():
    fit = lambda model: model.fit(graphs(), steps_per_epoch=1, verbose=0, shuffle=False)
    with pytest.warns(UserWarning, match="run_eagerly"):
        eager = run(compiled(run_eagerly=True), fit, on(1, 1))
    assert_close_logs(eager.logs, run(compiled(), fit, on(1, 1)).logs)


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 9:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_training_goes_on(tmp_path):
    whole = run(compiled(), fit_graphs, on(1, 1)).model
    backup = lambda: un.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=4)
    with pytest.raises(KeyboardInterrupt):
        run(compiled(), lambda model: fit_graphs(model, callbacks=[backup(), Interrupt()]), on(1, 1))
    resumed = run(compiled(), lambda model: fit_graphs(model, callbacks=[backup()]), on(1, 1)).model
    assert un.fingerprint(resumed) == un.fingerprint(whole)


class Scaled(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["rows"]) * inputs["times"]


ROWS = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
LABELS = ROWS.sum(1, keepdims=True)
WHOLE = {
    "a number among the inputs": ({"rows": ROWS, "times": np.float32(2)}, LABELS),
    "a weight for all rows": ({"rows": ROWS, "times": np.ones(8)}, LABELS, np.float32(2)),
    "one target for all rows": ({"rows": ROWS, "times": np.float32(1)}, np.ones((1, 1), "float32")),
}


@pytest.mark.parametrize("name", WHOLE)
def test_numbers_for_all_rows_are_taken_as_in_keras(name):
    def make():
        model = Scaled()
        model.compile("sgd", "mse")
        return model

    fit = lambda model: model.fit((WHOLE[name] for _ in range(9)), steps_per_epoch=3, verbose=0, shuffle=False)
    plain, ours = run(make, fit), run(make, fit, on(1, 1))
    assert_close_logs(ours.logs, plain.logs)
    assert ours.model.train_on_batch(*WHOLE[name]) == pytest.approx(plain.model.train_on_batch(*WHOLE[name]), rel=1e-5)
    with pytest.raises(ValueError, match=r"Batch 0 holds (a scalar|arrays of).*With replicas=1 such a batch is taken whole"):
        run(make, fit, on(1, 2))


def test_an_error_names_the_shapes_of_the_batch():
    x, y, weights = next(graphs())
    wrong = iter([(x, y, weights), (x, y, weights[:2])])
    with pytest.raises(ValueError, match=r"could not run on a batch of shapes \(\{.*'nodes': \(8, 5\).*\}, \(3, 1\), \(2,\)\)"):
        run(compiled(), lambda model: model.fit((batch for batch in wrong), verbose=0, shuffle=False), on(1, 1))


def test_batches_without_rows_are_refused():
    empty = ((ROWS[:0], LABELS[:0]) for _ in range(1))
    with pytest.raises(ValueError, match="Batch 0 has no rows"):
        run(compiled(), lambda model: model.fit(empty, verbose=0, shuffle=False), on(1, 1))


@pytest.mark.parametrize("shape", [(1, 4, 3), (1, 0, 3)])
def test_a_batch_of_one_row_is_computed_whole(shape, capsys):
    """Keras' LayerNormalization is another program for one row, which looks at no others: nothing is said of them."""

    def make():
        model = keras.Sequential([keras.Input(shape[1:]), layers.LayerNormalization(), layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    x, y = np.arange(math.prod(shape), dtype="float32").reshape(shape), np.ones((*shape[:2], 2), "float32")
    train = lambda model: model.fit(x, y, verbose=0)
    with warnings.catch_warnings(action="ignore"):  # fewer rows than replicas
        plain, ours = run(make, train), run(make, train, on(1, 4))
    assert_close_logs(ours.logs, plain.logs)
    assert "other rows" not in "".join(capsys.readouterr())
