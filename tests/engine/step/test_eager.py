"""Steps that are not compiled: the same training up to rounding, with values that are known where the user's code looks."""

from __future__ import annotations

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import MODELS, crossentropy
from own_metrics import Keeps
from sizes import BATCH, ROWS, cases, slow
from trainings import assert_close_logs, distance, fitting, labels, on, rows, run
from unisono._src.keras.checks.jax_errors import StepError

ROWS = cases(BATCH + 1, ROWS)
X, Y = rows(ROWS, 6), labels(ROWS, 3)
NET = cases("dense", "normalized")
"""Of the loops; a step that is not compiled compiles each operation by itself."""
TOLERANCE = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:.*operation by operation:UserWarning")


def counted(y_true, y_pred):
    return ops.sum(ops.cast(ops.argmax(y_pred, -1) == ops.cast(ops.reshape(y_true, (-1,)), "int32"), "float32"))


class Activity(layers.Layer):
    """Adds a sum by hand, as `add_loss` is often used."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


def classifier(**options):
    def make():
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(8, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.3, seed=1),
                Activity(),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.layers[1].synchronized = True  # a step that is not compiled sees the whole batch
        model.compile(
            "sgd",
            "sparse_categorical_crossentropy",
            metrics=["accuracy", Keeps(lambda old, t, p: old + counted(t, p), "right")],
            weighted_metrics=["accuracy"],
            **options,
        )
        return model

    return make


@pytest.mark.slow
@pytest.mark.parametrize("option", ["run_eagerly", "jit_compile"])
@pytest.mark.parametrize("replicas", [4, 1])
def test_training_is_that_of_compiled_steps(option, replicas):
    """Regularizers, moving statistics, random masks, sums by hand, weights of classes, metrics of the user's own, ragged rows."""
    count, epochs = cases((BATCH + 1, 1), (ROWS, 2))
    weights = {0: 0.5, 1: 2.0, 2: 0.0}
    fit = fitting(X[:count], Y[:count], batch_size=BATCH, class_weight=weights, epochs=epochs, validation_data=(X[:9], Y[:9]))
    eager = run(classifier(**{option: option == "run_eagerly"}), fit, on(1, replicas))
    compiled = run(classifier(), fit, on(1, replicas))
    assert distance(eager.model, compiled.model) < TOLERANCE
    assert_close_logs(eager.logs, compiled.logs)
    evaluated, predicted = (
        [getattr(one.model, method)(*data, batch_size=BATCH, verbose=0) for one in (eager, compiled)]
        for method, data in (("evaluate", (X[:count], Y[:count])), ("predict", (X[:count],)))
    )
    for ours, theirs in zip(*evaluated, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    np.testing.assert_allclose(*predicted, atol=1e-5)


@pytest.mark.slow
def test_devices_make_no_difference():
    """All replicas run on the first."""
    fit = fitting(X[: BATCH + 1], Y[: BATCH + 1], batch_size=BATCH)
    replicas = cases(2, 4)
    first, other = (run(classifier(run_eagerly=True), fit, on(devices, replicas)) for devices in (1, replicas))
    assert first.bits == other.bits


class Looking(keras.Model):
    """Asks for numbers in `call`, which is differentiated."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, activation="softmax")
        self.seen = []

    def call(self, x):
        y = self.dense(x)
        if ops.max(y) > 0:
            self.seen.append((len(x), float(ops.mean(x)), float(ops.stop_gradient(ops.max(y)))))
        return y


def looking_loss(y_true, y_pred):
    assert ops.all(y_pred <= 1)
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def looking_metric(y_true, y_pred):
    assert float(ops.sum(y_pred)) > 0
    return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)


def test_values_are_known_in_the_users_code():
    """The forward pass sees the whole batch, once a step. Nothing of it can be traced, not to build the model either."""
    x, y = X[: cases(BATCH, ROWS)], Y[: cases(BATCH, ROWS)]

    def make():
        model = Looking()
        model.compile("sgd", looking_loss, metrics=[looking_metric], run_eagerly=True)
        return model

    model = run(make, fitting(x, y, batch_size=BATCH), on(1, 4)).model
    model.seen.clear()
    model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    assert [length for length, *_ in model.seen] == [BATCH]
    np.testing.assert_allclose([mean for _, mean, _ in model.seen], X[:BATCH].mean(), rtol=1e-4)
    model.evaluate(x, y, batch_size=BATCH, verbose=0)
    assert model.predict(x, batch_size=BATCH, verbose=0).shape == (len(x), 3)


class InNumPy(layers.Layer):
    """Cannot be compiled."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return x * np.asarray(ops.stop_gradient(ops.max(ops.abs(x))) > 0, "float32")


def test_a_layer_that_cannot_be_compiled_trains():
    """The error without the option names it."""

    def make(**options):
        def made():
            model = keras.Sequential([InNumPy(), layers.Dense(2)])
            model.compile("sgd", "mse", **options)
            return model

        return made

    def without():
        model = keras.Sequential([layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    fit = fitting(X[:BATCH], rows(BATCH, 2, seed=1), batch_size=BATCH)
    assert distance(run(make(run_eagerly=True), fit, on(1, 4)).model, run(without, fit, on(1, 4)).model) < TOLERANCE
    with pytest.raises(StepError, match=r"'in_num_py.*' \(InNumPy\) cannot be compiled[\s\S]*run_eagerly=True"):
        run(make(), fit, on(1, 4))


def test_errors_of_the_users_code_pass_as_they_are():
    with on(1, 2).scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(2)])
        model.compile("sgd", lambda t, p: 1 / 0, run_eagerly=True)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        model.fit(X, rows(ROWS, 2), verbose=0)


class OwnStep(keras.Model):
    """Trains by the step of Keras' guide."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.tracker = keras.metrics.Mean(name="loss")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, state, data):
        weights, others, slots, tracked = state
        x, y = data

        def loss_of(weights, others):
            y_pred, others = self.stateless_call(weights, others, x)
            loss = ops.mean(ops.square(y_pred - y))
            assert loss >= 0
            return loss, others

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        tracked = self.tracker.stateless_update_state(tracked, loss)
        return {"loss": self.tracker.stateless_result(tracked)}, (weights, others, slots, tracked)


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_a_step_of_the_models_own(replicas):
    def make(**options):
        def made():
            model = OwnStep()
            model.build((None, 6))
            model.compile("sgd", **options)
            return model

        return made

    targets = rows(ROWS, 2, seed=1)
    eager = run(make(run_eagerly=True), fitting(X, targets, batch_size=BATCH), on(1, replicas))
    plain = run(make(run_eagerly=True), fitting(X, targets, batch_size=BATCH))
    assert distance(eager.model, plain.model) < TOLERANCE
    assert_close_logs(eager.logs, plain.logs)


def test_fingerprints_say_that_nobody_promises_these_bits():
    """Also when the model is compiled again: its bits come from steps that were not."""
    with on(1, 2).scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(2)])
        model.compile("sgd", "mse")
        assert not un.fingerprint(model).startswith("unpromised-")
        model.compile("sgd", "mse", run_eagerly=True)
    assert un.fingerprint(model).startswith("unpromised-")
    model.compile("sgd", "mse")
    assert not un.fingerprint(model).startswith("unpromised-")
    model.compile("sgd", "mse", jit_compile=False)
    model.train_on_batch(X[:BATCH], rows(BATCH, 2))
    model.compile("sgd", "mse")
    assert un.fingerprint(model).startswith("unpromised-")


@pytest.mark.filterwarnings("default")
def test_one_warning_says_that_it_is_slow():
    with on(1, 2).scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(2)], name="net")
        model.compile("sgd", "mse", run_eagerly=True, steps_per_execution=2)
    with pytest.warns(UserWarning, match=r"'net' is compiled with run_eagerly=True: .*slow.*'unpromised-'"):
        model.fit(X, rows(ROWS, 2), batch_size=BATCH, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, rows(ROWS, 2), batch_size=BATCH, verbose=0)
        model.evaluate(X, rows(ROWS, 2), verbose=0)
        model.predict(X, verbose=0)


class Steps:
    """A loop of the user's own: a net, an optimizer, a metric."""

    def __init__(self, strategy, model=NET):
        keras.utils.set_random_seed(0)
        self.strategy, self.seen = strategy, []
        with strategy.scope():
            self.model = MODELS[model]()
            for layer in self.model.layers:
                if isinstance(layer, layers.Dropout):
                    layer.rate = 0  # other numbers are drawn than in a compiled loop
            self.optimizer, self.loss = keras.optimizers.SGD(0.1), crossentropy(reduction=None)
            self.metric = keras.metrics.SparseCategoricalAccuracy()

    def replica(self, batch):
        x, y = batch

        def loss_of():
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        (loss, logits), gradients = un.value_and_grad(loss_of, self.model.trainable_variables, has_aux=True)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.metric.update_state(y, logits)
        return loss, logits

    def looking(self, batch):
        """Cannot be traced."""
        self.seen.append(float(ops.mean(batch[0])))
        return self.replica(batch)

    def trained(self, one):
        """(losses, accuracy, what the replicas returned last) of a pass by this function of a batch."""
        losses = []
        count = cases(BATCH, ROWS)
        for batch in self.strategy.distribute_dataset((X[:count], Y[:count]), batch_size=BATCH):
            loss, logits = one(batch)
            losses.append(float(self.strategy.reduce("SUM", loss)))
        return [*losses, float(self.metric.result())], np.asarray(self.strategy.gather(logits, axis=0))


@pytest.mark.parametrize("devices", [1, *slow(3)])
def test_a_loop_trains_as_a_compiled_one(devices):
    """Where functions are traced, they are looked at for mistakes; one that cannot be traced runs too."""
    compiled, eager, looking = (Steps(on(devices, 4)) for _ in range(3))
    expected = compiled.trained(un.function(lambda batch: compiled.strategy.run(compiled.replica, args=(batch,))))
    found = eager.trained(un.function(lambda batch: eager.strategy.run(eager.replica, args=(batch,)), eager=True))
    with pytest.raises(StepError, match=r"'looking' could not run"):
        looking.trained(lambda batch: looking.strategy.run(looking.looking, args=(batch,)))
    looking = Steps(on(devices, 4))

    @un.function(eager=True)
    def step(batch):
        return looking.strategy.run(looking.looking, args=(batch,))

    also = looking.trained(step)
    for numbers, logits in (found, also):
        np.testing.assert_allclose(numbers, expected[0], rtol=TOLERANCE)
        np.testing.assert_allclose(logits, expected[1], rtol=1e-4, atol=1e-5)
    assert distance(eager.model, compiled.model) < TOLERANCE
    assert un.fingerprint(eager.model, eager.optimizer) == un.fingerprint(looking.model, looking.optimizer)
    assert un.fingerprint(eager.model).startswith("unpromised-")
    assert not un.fingerprint(compiled.model).startswith("unpromised-")


def test_values_pass_between_compiled_and_other_runs():
    strategy = on(3, 4)
    double = lambda x: x * 2
    run_eagerly = un.function(lambda *args: strategy.run(double, args=args), eager=True)
    (batch,) = list(strategy.distribute_dataset(X[:6], batch_size=6))
    there = strategy.run(double, args=(run_eagerly(strategy.run(double, args=(batch,))),))
    np.testing.assert_array_equal(strategy.gather(there, axis=0), 8 * X[:6])


def test_the_default_strategy_runs_code_that_is_not_compiled():
    strategy = un.get_strategy()
    double = un.function(lambda x: strategy.run(lambda x: x * 2, args=(x,)), eager=True)
    with pytest.warns(UserWarning, match="is not compiled"):
        np.testing.assert_array_equal(strategy.local_results(double(X[:3]))[0], 2 * X[:3])


@pytest.mark.slow
def test_a_model_that_says_run_eagerly_does_so_in_a_loop():
    steps = Steps(on(1, 2), "dense")
    steps.model.compile(run_eagerly=True)
    steps.trained(lambda batch: steps.strategy.run(steps.looking, args=(batch,)))
    assert len(steps.seen) > ROWS // BATCH


def test_mistakes_are_found_in_what_is_not_compiled():
    """All replicas on the same rows; a mean over a replica's rows."""
    steps = Steps(on(1, 4))

    @un.function(eager=True)
    def step(batch):
        return steps.strategy.run(lambda batch: steps.model(X[:8]), args=(batch,))

    with pytest.raises(ValueError, match=r"every one of the 4 replicas"):
        steps.trained(step)

    @un.function(eager=True)
    def mean(batch):
        def replica(batch):
            x, y = batch
            of = lambda: ops.mean(steps.loss(y, steps.model(x)))
            loss, gradients = un.value_and_grad(of, steps.model.trainable_variables)
            steps.optimizer.apply(gradients, steps.model.trainable_variables)
            return loss, x

        return steps.strategy.run(replica, args=(batch,))

    with pytest.warns(UserWarning, match="mean"):
        steps.trained(mean)


def test_one_warning_names_the_function_that_is_not_compiled():
    strategy = on(1, 2)
    (batch,) = list(strategy.distribute_dataset(X[:6], batch_size=6))
    step = un.function(lambda batch: strategy.run(counted_rows, args=(batch,)), eager=True)
    with pytest.warns(UserWarning, match=r"'counted_rows' is not compiled: .*slow.*'unpromised-'"):
        step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)


def counted_rows(x):
    return ops.shape(x)[0]


@pytest.mark.slow
def test_jax_disable_jit_is_obeyed():
    """For as long as it holds."""
    steps = Steps(on(1, 2), "dense")
    steps.model.compile("sgd", crossentropy())
    steps.model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
    assert not un.fingerprint(steps.model).startswith("unpromised-")
    step = un.function(lambda batch: steps.strategy.run(steps.looking, args=(batch,)))
    batch = next(iter(steps.strategy.distribute_dataset((X, Y), batch_size=BATCH)))
    with jax.disable_jit():
        steps.model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
        step(batch)
    assert len(steps.seen) >= 2
    with pytest.raises(StepError, match="'looking' could not run"):
        step(batch)


def test_a_function_without_replicas_is_called_as_it_is():
    total = keras.Variable(0.0, trainable=False)
    seen = []

    @un.function(eager=True)
    def add(x):
        seen.append(float(x))
        return total.assign_add(x)

    assert [float(add(np.float32(x))) for x in (2, 3)] == [2.0, 5.0]
    assert seen == [2.0, 3.0]
