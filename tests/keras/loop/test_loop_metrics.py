"""Metrics in a loop: as in fit, with no code of the user's."""

import keras
import numpy as np
import pytest
from keras import ops

import unisono as un
from loops import CLASSES, Loop, crossentropy, data
from own_metrics import Keeps
from sizes import mostly_slow, slow
from trainings import on

X, Y = data("dense", 43)
SCORES = np.random.default_rng(5).uniform(size=43).astype("float32")
TRUE = np.random.default_rng(6).integers(0, 2, 43)

METRICS = {
    "Mean": lambda: keras.metrics.Mean(),
    "Precision": lambda: keras.metrics.Precision(),
    "Recall": lambda: keras.metrics.Recall(thresholds=[0.3, 0.7]),
    "AUC": lambda: keras.metrics.AUC(),
    "SensitivityAtSpecificity": lambda: keras.metrics.SensitivityAtSpecificity(0.5),
    "RootMeanSquaredError": lambda: keras.metrics.RootMeanSquaredError(),
    "BinaryAccuracy": lambda: keras.metrics.BinaryAccuracy(),
    "a sum of one's own": lambda: Keeps(lambda old, y, p: old + ops.sum(ops.cast(p > 0.5, "float32")), "sum"),
    "a maximum of one's own": lambda: Keeps(lambda old, y, p: ops.maximum(old, ops.max(p)), "most"),
}


@pytest.mark.parametrize("name", mostly_slow(METRICS, "Precision", "a sum of one's own", "a maximum of one's own"))
def test_metrics_of_replicas_are_those_of_all_rows(name):
    strategy = on(3, 4)
    with strategy.scope():
        metric = METRICS[name]()
    whole = METRICS[name]()

    def code(batch):
        metric.update_state(*batch if name != "Mean" else (batch[1],))

    for batch in strategy.distribute_dataset((TRUE, SCORES), batch_size=10):
        strategy.run(code, args=(batch,))
    whole.update_state(*((TRUE, SCORES) if name != "Mean" else (SCORES,)))
    np.testing.assert_allclose(metric.result(), whole.result(), rtol=1e-5)
    metric.reset_state()
    assert all(not np.any(v.value) for v in metric.variables if "threshold" not in v.path)


class OwnSum(keras.metrics.Metric):
    """Adds up what it is fed with."""

    def __init__(self, shape=()):
        super().__init__()
        self.total = self.add_variable(shape, "zeros", name="total")

    def update_state(self, values):
        self.total.assign_add(values if self.total.shape else ops.sum(values))

    def result(self):
        return self.total.value


FED = {
    "all values of rows": lambda x: ops.reshape(x, (-1,)),
    "two views of rows": lambda x: ops.concatenate([x[:, 0], -2 * x[:, 1]]),
    "means of features": lambda x: ops.mean(x, axis=0),
    "a mean": lambda x: ops.mean(x),
    "a sum": lambda x: ops.sum(x),
    "sums of features": lambda x: ops.sum(x, axis=0),
    "a count": lambda x: ops.sum(ops.cast(x[:, 0] > 0, "float32")),
    "one number for each row": lambda x: x[:, 0],
}
QUICK = ("all values of rows", "means of features", "a mean", "a sum", "sums of features")


@pytest.mark.parametrize(
    ("kind", "fed", "batch_size"),
    [
        *((keras.metrics.Mean, fed, 24) for fed in QUICK),
        (keras.metrics.Sum, "means of features", 24),
        (OwnSum, "means of features", 24),
        *slow(*((keras.metrics.Mean, fed, size) for fed in FED for size in (24, 10, 4) if fed not in QUICK or size < 24)),
    ],
)
def test_a_metric_of_what_is_longer_than_the_rows_or_shorter(kind, fed, batch_size):
    """Of 24 rows, a replica has as many as there are features."""
    x = X[:24] if batch_size == 24 else X

    def feed(replicas):
        strategy = on(1, replicas)
        with strategy.scope():
            metric = kind()
        for batch in strategy.distribute_dataset(x, batch_size=batch_size):
            strategy.run(lambda x: metric.update_state(FED[fed](x)), args=(batch,))
        return [float(variable.value) for variable in metric.variables]

    whole = kind()
    for start in range(0, len(x), batch_size):
        whole.update_state(FED[fed](x[start : start + batch_size]))
    expected = [float(variable.value) for variable in whole.variables]
    np.testing.assert_allclose(feed(1), expected, rtol=1e-5)
    np.testing.assert_allclose(feed(4), expected, rtol=1e-5, atol=1e-6)


def test_a_metric_is_updated_in_replica_code_and_outside():
    strategy = on(2, 4)
    with strategy.scope():
        mean = keras.metrics.Mean()
    (batch,) = strategy.distribute_dataset([np.arange(10, dtype="float32")])
    mean.update_state(100.0)
    strategy.run(mean.update_state, args=(batch,))
    mean.update_state([0.0])
    assert float(mean.result()) == pytest.approx(145 / 12)


def test_an_epoch_of_a_loop_and_of_fit_say_the_same():
    loop = Loop(on(2, 4))
    loop.train(X[:24], Y[:24], epochs=1)
    other = Loop(on(1, 4))
    other.model.compile(other.optimizer, crossentropy(), metrics=["accuracy"])
    history = other.model.fit(X[:24], Y[:24], batch_size=12, shuffle=False, verbose=0).history
    assert float(loop.accuracy.result()) == history["accuracy"][0]


def test_a_step_that_fixes_the_rows_of_a_replica_is_refused():
    """What metrics become is computed for all rows. Numbers that are as many for any rows are drawn once for all of them."""
    strategy = on(1, 4)
    with strategy.scope():
        mean, seeds = keras.metrics.Mean(), keras.random.SeedGenerator(1)

    def code(rows, count):
        noise = keras.random.normal((count, 2), seed=seeds)
        mean.update_state(keras.ops.sum(rows + noise, axis=1))

    (batch,) = strategy.distribute_dataset([np.ones((12, 2), "float32")])
    shapes = r"incompatible shapes for broadcasting: \(12, 2\), \(3, 2\)"
    with pytest.raises(ValueError, match=shapes + r"(.|\n)*Replica code must not fix the number of rows: take it"):
        strategy.run(code, args=(batch, 3))
    strategy.run(code, args=(batch, 1))
    assert float(mean.count.value) == 12


@pytest.mark.parametrize(("replicas", "rows"), [(4, 7), *slow((1, 12))])
def test_what_is_summed_up_already_is_added_up(replicas, rows):
    """A number or a matrix of a replica's rows, fed to a sum: that of all rows, as in tf.distribute."""
    loop = Loop(on(1, replicas))
    with loop.strategy.scope():
        sum_, shares, count, both = (keras.metrics.Sum() for _ in range(4))
        total, mean = OwnSum((CLASSES, CLASSES)), keras.metrics.Mean()

    def code(batch):
        values, predicted = loop.loss(batch[1], loop.model(batch[0])), ops.argmax(loop.model(batch[0]), -1)
        sum_.update_state(ops.sum(values))
        shares.update_state(un.compute_average_loss(values))
        count.update_state(float(batch[0].shape[0]))
        both.update_state(values)
        both.update_state(ops.sum(values))
        total.update_state(ops.transpose(ops.one_hot(batch[1], CLASSES)) @ ops.one_hot(predicted, CLASSES))
        mean.update_state(ops.mean(values), sample_weight=float(batch[0].shape[0]))

    loop.strategy.run(code, args=(loop.first(rows),))
    x, y = data("dense", rows)
    truth = np.asarray(crossentropy(None)(y, loop.model(x)))
    found = [float(metric.result()) for metric in (sum_, shares, count, both, mean)]
    np.testing.assert_allclose(found, [truth.sum(), truth.mean(), rows, 2 * truth.sum(), truth.mean()], rtol=1e-5)
    assert float(ops.sum(total.result())) == rows
