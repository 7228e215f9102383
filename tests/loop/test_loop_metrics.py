"""Metrics, moving statistics and precision in a loop: as in fit, with no code of the user's."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, crossentropy, data
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
}


@pytest.mark.parametrize("name", mostly_slow(METRICS, "Precision"))
@pytest.mark.parametrize("devices", [3, *slow(1)])
def test_metrics_of_replicas_are_those_of_all_rows(name, devices):
    strategy = on(devices, 4)
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


@pytest.mark.parametrize(
    "fed", mostly_slow(FED, "all values of rows", "means of features", "a mean", "a sum", "sums of features")
)
@pytest.mark.parametrize("batch_size", [24, *slow(10, 4)])
def test_a_mean_of_what_is_longer_than_the_rows_or_shorter(fed, batch_size):
    """Of 24 rows, a replica has as many as there are features."""
    x = X[:24] if batch_size == 24 else X

    def feed(replicas):
        strategy = on(1, replicas)
        with strategy.scope():
            mean = keras.metrics.Mean()
        for batch in strategy.distribute_dataset(x, batch_size=batch_size):
            strategy.run(lambda x: mean.update_state(FED[fed](x)), args=(batch,))
        return [float(variable.value) for variable in mean.variables]

    whole = keras.metrics.Mean()
    for start in range(0, len(x), batch_size):
        whole.update_state(FED[fed](x[start : start + batch_size]))
    expected = [float(variable.value) for variable in whole.variables]
    np.testing.assert_allclose(feed(1), expected, rtol=1e-5)
    np.testing.assert_allclose(feed(4), expected, rtol=1e-5, atol=1e-6)


class OwnSum(keras.metrics.Metric):
    """Adds up what it is fed with."""

    def __init__(self):
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, values):
        self.total.assign_add(ops.sum(values))

    def result(self):
        return self.total.value


@pytest.mark.parametrize("kind", [keras.metrics.Sum, OwnSum])
def test_a_sum_of_what_is_as_long_as_the_rows_by_chance(kind):
    """A replica has as many rows as there are features: a mean over the rows is no value of a row."""
    x = X[:24]

    def feed(replicas):
        strategy = on(1, replicas)
        with strategy.scope():
            metric = kind()
        for batch in strategy.distribute_dataset(x, batch_size=24):
            strategy.run(lambda x: metric.update_state(ops.mean(x, axis=0)), args=(batch,))
        return float(metric.result())

    expected = np.sum(np.mean(x, axis=0))
    np.testing.assert_allclose([feed(1), feed(4)], [expected, expected], rtol=1e-4)


class Farthest(keras.metrics.Metric):
    """Keeps a maximum."""

    def __init__(self):
        super().__init__()
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, values):
        self.most.assign(ops.maximum(self.most, ops.max(values)))

    def result(self):
        return self.most.value


class Counted(keras.metrics.Metric):
    """Keeps a sum."""

    def __init__(self):
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, values):
        self.total.assign_add(ops.sum(ops.cast(values > 0.5, "float32")))

    def result(self):
        return self.total.value


def test_metrics_of_the_users_own():
    """Sums, and what is none: both are those of all rows."""
    strategy = on(2, 4)
    with strategy.scope():
        counted, farthest = Counted(), Farthest()
    for batch in strategy.distribute_dataset(SCORES[:16], batch_size=8):
        strategy.run(counted.update_state, args=(batch,))
        strategy.run(farthest.update_state, args=(batch,))
    assert float(counted.result()) == (SCORES[:16] > 0.5).sum()
    assert float(farthest.result()) == SCORES[:16].max()


def test_a_mean_of_one_number_for_each_replica_weighs_rows():
    strategy = on(2, 4)
    with strategy.scope():
        mean = keras.metrics.Mean()
    for batch in strategy.distribute_dataset(SCORES, batch_size=43):
        strategy.run(lambda batch: mean.update_state(ops.mean(batch)), args=(batch,))
    np.testing.assert_allclose(mean.result(), SCORES.mean(), rtol=1e-5)


@pytest.mark.slow
def test_a_metric_outside_of_replica_code():
    """Updated with what reduce gives, as a plain metric; and goes on in replica code from there."""
    loop = Loop(on(2, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean()
    losses = []
    for batch in loop.strategy.distribute_dataset((X, Y), batch_size=12):
        losses.append(float(loop.one(batch)))
        mean.update_state(losses[-1])
    np.testing.assert_allclose(mean.result(), np.mean(losses), rtol=1e-6)
    loop.strategy.run(lambda batch: mean.update_state(batch[0][:, 0] * 0 + losses[0]), args=(batch,))
    np.testing.assert_allclose(mean.result(), np.mean(losses + [losses[0]] * 7), rtol=1e-5)


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


@pytest.mark.slow
def test_one_replica_that_overflows_skips_the_step_for_all():
    """The scale is halved once, weights and slots stay."""
    loop = Loop(
        on(2, 4), optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=8)
    )
    loop.train(X, Y, epochs=1)
    wrong = X[:12].copy()
    wrong[5] = np.inf
    (good,) = loop.strategy.distribute_dataset([(X[:12], Y[:12])])
    (bad,) = loop.strategy.distribute_dataset([(wrong, Y[:12])])
    before = un.fingerprint(loop.model.trainable_variables, loop.optimizer.inner_optimizer)
    loop.one(bad)
    assert un.fingerprint(loop.model.trainable_variables, loop.optimizer.inner_optimizer) == before
    assert float(loop.optimizer.dynamic_scale.value) == 4
    loop.one(good)
    assert un.fingerprint(loop.model.trainable_variables, loop.optimizer.inner_optimizer) != before
    assert float(loop.optimizer.dynamic_scale.value) == 4


def test_clipping_acts_on_the_sum_of_all_replicas():
    """Opposite gradients: 1 - 5 is clipped, not each of them."""
    strategy = on(2, 2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0)

    def code(batch):
        value, gradients = un.value_and_grad(lambda: ops.sum(batch * weight), [weight])
        optimizer.apply(gradients, [weight])
        return value

    (batch,) = strategy.distribute_dataset([np.array([1.0, -5.0], "float32")])
    strategy.run(code, args=(batch,))
    assert float(weight.value) == 2.0


def test_masked_tokens_are_not_counted():
    """A loss over tokens is divided by the valid ones, as in fit; by weights, where the code gives some."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (11, 6)) * (np.arange(6) < rng.integers(1, 7, (11, 1)))
    targets = rng.integers(0, CLASSES, (11, 6))

    def make(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [layers.Input((6,), dtype="int32"), layers.Embedding(20, 8, mask_zero=True), layers.Dense(CLASSES)]
            )
            return model, keras.optimizers.SGD(0.5)

    def by_loop(strategy, weights):
        model, optimizer = make(strategy)
        loss_fn = crossentropy(None)

        def code(batch):
            def loss():
                values = loss_fn(batch[1], model(batch[0]))
                return (values, ops.cast(batch[0] != 0, "float32")) if weights else values

            value, gradients = un.value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        (batch,) = strategy.distribute_dataset([(tokens, targets)])
        return float(strategy.reduce("SUM", strategy.run(code, args=(batch,)))), un.fingerprint(model.trainable_variables)

    model, optimizer = make(on(2, 4))
    model.compile(optimizer, crossentropy())
    loss = model.fit(tokens, targets, batch_size=11, shuffle=False, verbose=0).history["loss"][0]
    by_mask = by_loop(on(2, 4), weights=False)
    assert by_mask == by_loop(on(1, 4), weights=False)
    assert by_mask == (pytest.approx(loss), un.fingerprint(model.trainable_variables))
    assert by_loop(on(2, 4), weights=True)[0] == pytest.approx(loss, rel=1e-6)


def test_an_epoch_of_a_loop_and_of_fit_say_the_same():
    loop = Loop(on(2, 4))
    loop.train(X[:24], Y[:24], epochs=1)
    keras.utils.set_random_seed(0)
    other = Loop(on(1, 4))
    other.model.compile(other.optimizer, crossentropy(), metrics=["accuracy"])
    history = other.model.fit(X[:24], Y[:24], batch_size=12, shuffle=False, verbose=0).history
    assert float(loop.accuracy.result()) == history["accuracy"][0]


class SquaredErrors(keras.metrics.Metric):
    """A sum by hand."""

    def __init__(self):
        super().__init__(name="squared_errors")
        self.total = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.square(keras.ops.cast(y_true, "float32") - y_pred[:, 0])))

    def result(self):
        return self.total.value


@pytest.mark.parametrize("layer", slow(lambda: layers.Dropout(0.5), layers.BatchNormalization))
def test_a_metric_of_the_users_in_a_step_that_looks_at_the_batch_or_draws(layer):
    """It is a sum, whatever the step does beside it: what fit says."""
    x, y = data("dense", 24)

    def model():
        return keras.Sequential([layers.Input((6,)), layers.Dense(4), layer(), layers.Dense(CLASSES)])

    loop = Loop(on(1, 4), model)
    with loop.strategy.scope():
        loop.accuracy = SquaredErrors()
    loop.train(x, y, epochs=1)
    keras.utils.set_random_seed(0)
    strategy = on(2, 4)
    with strategy.scope():
        fitted, metric = model(), SquaredErrors()
    fitted.compile("adam", crossentropy(), metrics=[metric])
    history = fitted.fit(x, y, batch_size=12, shuffle=False, verbose=0).history
    np.testing.assert_allclose(loop.accuracy.result(), history["squared_errors"][0], rtol=1e-5)


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


@pytest.mark.slow
def test_a_mask_reaches_what_the_values_are_made_into():
    """Added to, or with weights: the losses of fit."""
    x, _ = data("lstm", 8)
    y = np.random.default_rng(1).integers(0, CLASSES, x.shape)
    weights = np.broadcast_to(np.linspace(0.2, 3, 8, dtype="float32")[:, None], x.shape).copy()

    def model(regularizer=None):
        hidden = layers.Embedding(30, 8, mask_zero=True), layers.Dense(CLASSES, kernel_regularizer=regularizer)
        return keras.Sequential([layers.Input((10,), dtype="int32"), *hidden])

    def by_fit(regularizer=None, reduction="sum_over_batch_size", **options):
        keras.utils.set_random_seed(0)
        strategy = on(1, 4)
        with strategy.scope():
            fitted = model(regularizer)
        fitted.compile("sgd", crossentropy(reduction))
        return fitted.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options).history["loss"][0]

    def by_loop(regularizer, value):
        loop = Loop(on(1, 4), lambda: model(regularizer))
        (batch,) = loop.strategy.distribute_dataset([(x, y, weights)])

        def code(batch):
            loss = lambda: value(loop, loop.loss(batch[1], loop.model(batch[0])), batch[2])
            return un.value_and_grad(loss, loop.model.trainable_variables)[0]

        return float(loop.strategy.reduce("SUM", loop.strategy.run(code, args=(batch,))))

    added = by_loop("l2", lambda loop, values, _: values + sum(loop.model.losses))
    np.testing.assert_allclose(added, by_fit("l2"), rtol=1e-5)
    weighted = by_loop(None, lambda _, values, weights: (values, weights))
    np.testing.assert_allclose(weighted, by_fit(None, "mean_with_sample_weight", sample_weight=weights), rtol=1e-5)


class Total(keras.metrics.Metric):
    """Adds what it is given to a matrix."""

    def __init__(self):
        super().__init__()
        self.matrix = self.add_weight(shape=(CLASSES, CLASSES), initializer="zeros")

    def update_state(self, more):
        self.matrix.assign_add(more)

    def result(self):
        return self.matrix


@pytest.mark.parametrize("replicas", [4, *slow(1)])
@pytest.mark.parametrize("rows", [7, *slow(12)])
def test_what_is_summed_up_already_is_added_up(replicas, rows):
    """A number or a matrix of a replica's rows, fed to a sum: that of all rows, as in tf.distribute."""
    loop = Loop(on(1, replicas))
    with loop.strategy.scope():
        sum_, shares, count, both, total, mean = (
            *(keras.metrics.Sum() for _ in range(4)), Total(), keras.metrics.Mean(),
        )  # fmt: skip

    def code(batch):
        values, predicted = loop.loss(batch[1], loop.model(batch[0])), ops.argmax(loop.model(batch[0]), -1)
        sum_.update_state(ops.sum(values))
        shares.update_state(un.compute_average_loss(values))
        count.update_state(float(batch[0].shape[0]))
        both.update_state(values)
        both.update_state(ops.sum(values))
        total.update_state(ops.transpose(ops.one_hot(batch[1], CLASSES)) @ ops.one_hot(predicted, CLASSES))
        mean.update_state(ops.mean(values), sample_weight=float(batch[0].shape[0]))

    loop.strategy.run(code, args=(next(iter(loop.strategy.distribute_dataset((X[:rows], Y[:rows]), batch_size=12))),))
    truth = np.asarray(crossentropy(None)(Y[:rows], loop.model(X[:rows])))
    found = [float(metric.result()) for metric in (sum_, shares, count, both, mean)]
    np.testing.assert_allclose(found, [truth.sum(), truth.mean(), rows, 2 * truth.sum(), truth.mean()], rtol=1e-5)
    assert float(ops.sum(total.result())) == rows
