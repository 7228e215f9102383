"""State that lives through a training, in scenarios: optimizers and their schedules, loss scales, batch statistics, and how many
steps one call runs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import unisono as un
from sizes import BATCH, ROWS, cases, mostly_slow, slow
from trainings import (
    ADAM_TOLERANCE,
    SGD_TOLERANCE,
    assert_close_logs,
    assert_equals_keras,
    assert_same_bits,
    distance,
    fitting,
    labels,
    on,
    rows,
    run,
    weights,
)

X, Y = rows(ROWS, 5), 3 * rows(ROWS, 2, seed=1)
HALF_TOLERANCE = 1e-2


def regressor(optimizer, dtype="float32", **options):
    """A function that makes a model with this optimizer, its hidden layer in this precision."""

    def make():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(7, "tanh", dtype=dtype), layers.Dense(2)])
        model.compile(optimizer(), "mse", **options)
        return model

    return make


FIT = fitting(X, Y, batch_size=BATCH)


# --- optimizers -------------------------------------------------------------------------------------------------------


def several():
    """One optimizer for the kernels, another for the rest."""
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.02), {".*/kernel": optimizers.SGD(0.1, momentum=0.9)})
    )


def always(optimizer):
    """A function that picks this one for every variable."""
    return lambda variable: optimizer


def by_path(made):
    """A function that picks a variable's optimizer."""
    return lambda variable: made.setdefault("kernel" in variable.path, optimizers.Adam(0.02))


OPTIMIZERS = {
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adam": lambda: optimizers.Adam(0.02),
    "AdamW": lambda: optimizers.AdamW(0.02, weight_decay=0.1),
    "Adamax": lambda: optimizers.Adamax(0.02),
    "Ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
    "Lamb": lambda: optimizers.Lamb(0.02),
    "Lion": lambda: optimizers.Lion(0.01),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.05, momentum=0.9)),
    "MultiOptimizer": several,
    "MultiOptimizer of a function": lambda: optimizers.MultiOptimizer(by_path({})),
    "Muon": lambda: optimizers.Muon(0.02, adam_lr_ratio=0.5),
    "Nadam": lambda: optimizers.Nadam(0.02),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "SGD": lambda: optimizers.SGD(0.1, loss_scale_factor=1024.0),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.02),
}


def test_every_optimizer_of_keras_is_here():
    """One that a new Keras brings is tried here before anyone trusts it."""
    kinds = {name for name, kind in vars(optimizers).items() if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)}
    assert {name.split()[0] for name in OPTIMIZERS} == kinds - {"Optimizer"}


COMMON = ("MultiOptimizer",)
"""Which `make test` tries; `make test-all` tries all."""


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, *COMMON))
def test_optimizers_of_keras(name):
    """Five ragged steps are those of plain Keras on whole batches, slots and weights the same bits on every placement."""
    assert_equals_keras(regressor(OPTIMIZERS[name]), FIT, tolerance=ADAM_TOLERANCE)


@pytest.mark.parametrize("of", ["the wrapper's optimizer", "one of several", "what a function picks"])
def test_accumulation_inside_another_optimizer_is_refused(of):
    """However deep it is, the error says the line to write instead."""
    inner = lambda: optimizers.SGD(0.1, gradient_accumulation_steps=6)
    whole = {
        "the wrapper's optimizer": lambda: optimizers.LossScaleOptimizer(inner()),
        "one of several": lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(inner())),
        "what a function picks": lambda: optimizers.MultiOptimizer(always(inner())),
    }
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=6.*accumulate=6\).*batch_size=6 times"):
        run(regressor(whole[of]), FIT, on(3))


class Warming(optimizers.schedules.LearningRateSchedule):
    """A user's own schedule, of the step alone."""

    def __call__(self, step):
        return 0.02 * (keras.ops.cast(step, "float32") + 1)

    def get_config(self):
        return {}


SCHEDULES = {
    "CosineDecay": lambda: optimizers.schedules.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2),
    "CosineDecayRestarts": lambda: optimizers.schedules.CosineDecayRestarts(0.2, 2, t_mul=1.5),
    "ExponentialDecay": lambda: optimizers.schedules.ExponentialDecay(0.2, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: optimizers.schedules.InverseTimeDecay(0.2, 2, 0.5),
    "PiecewiseConstantDecay": lambda: optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.2, 0.1, 0.05]),
    "PolynomialDecay": lambda: optimizers.schedules.PolynomialDecay(0.2, 2, 0.01, cycle=True),
    "a user's own": Warming,
}


def test_every_schedule_of_keras_is_here():
    kinds = {name for name, kind in vars(optimizers.schedules).items() if isinstance(kind, type)}
    assert kinds - {"LearningRateSchedule"} <= SCHEDULES.keys()


@pytest.mark.parametrize("name", ["CosineDecay", *slow(*(name for name in SCHEDULES if name != "CosineDecay"))])
def test_schedules_count_steps(name):
    """The rate of a step is that of plain Keras: replicas are no steps."""
    assert_equals_keras(regressor(lambda: optimizers.SGD(SCHEDULES[name]())), FIT, devices=(3,))


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [None, 2])
def test_averages_of_weights(overwrite):
    """use_ema: the averages count steps, and take the place of the weights where plain Keras puts them there."""
    make = regressor(lambda: optimizers.Adam(0.02, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=overwrite))
    assert_equals_keras(make, FIT, tolerance=ADAM_TOLERANCE)


def used_again(between):
    """Fit, and then whatever uses the memory of the state again, with `between(model)` before each."""

    def use(model):
        FIT(model)
        between(model)
        model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        between(model)
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        between(model)
        return FIT(model)

    return use


def test_weights_that_are_their_averages_train_on():
    """After fit weights and averages are one array. Plain Keras cannot train such a model on, unless its weights are set anew."""
    make = regressor(lambda: optimizers.SGD(0.02, use_ema=True, ema_momentum=0.7))
    plain = run(make, used_again(lambda model: model.set_weights(model.get_weights())))
    ours = assert_same_bits(make, used_again(lambda model: None), devices=(3,))
    assert distance(ours.model, plain.model) <= SGD_TOLERANCE
    assert_close_logs(ours.logs, plain.logs)


# --- loss scales and precision ----------------------------------------------------------------------------------------


def scaled(growth=2, **options):
    """SGD with momentum under a loss scale of 16 that doubles after `growth` good steps."""
    return lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05, momentum=0.9, **options), initial_scale=16.0, dynamic_growth_steps=growth
    )


def bad(kind, row=7):
    """The rows, one of them with what is not a number, or too large for one."""
    x = X[:BATCH].copy()
    x[row] = kind
    return x


def counters(model):
    """(loss scale, good steps since it changed, steps that were taken)."""
    optimizer = model.optimizer
    return tuple(float(v.value) for v in (optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations))


@pytest.mark.parametrize("kind", [np.nan, *slow(np.inf)])
def test_the_loss_scale_grows_and_halves_as_in_keras(kind):
    """Good and bad batches in turns: scale, good steps and iterations after each, on every placement. A bad step is none."""
    batches = [X[:8], X[8:16], bad(kind), X[16:24], bad(kind, 0), bad(kind), X[24:32], X[25:], X[:3]]
    seen = []
    for strategy in (None, on(1), on(3), *cases((), (on(8),))):
        of_run: list = []
        model = run(regressor(scaled()), lambda model: model, strategy).model
        for x in batches:
            model.train_on_batch(x, Y[: len(x)])
            of_run.append(counters(model))
        seen.append((of_run, un.fingerprint(model) if strategy else None))
    assert all(other == seen[1] for other in seen[2:])
    assert seen[1][0] == seen[0][0]
    assert seen[0][0] == [
        (16, 1, 1), (32, 0, 2), (16, 0, 2), (16, 1, 3), (8, 0, 3), (4, 0, 3), (4, 1, 4), (8, 0, 5), (8, 1, 6),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 7])
def test_one_bad_replica_skips_the_step_of_all(kind, row):
    """Weights, momentum and iterations keep their bits, and the scale halves once, whichever replica has the bad row."""
    for strategy in (on(1), on(3)):
        model = run(regressor(scaled()), lambda model: model.train_on_batch(X[:BATCH], Y[:BATCH]), strategy).model
        before = un.fingerprint(weights(model), [v.value for v in model.optimizer.inner_optimizer.variables])
        model.train_on_batch(bad(kind, row), Y[:BATCH])
        assert un.fingerprint(weights(model), [v.value for v in model.optimizer.inner_optimizer.variables]) == before
        assert counters(model) == (8.0, 0.0, 1.0)


def test_a_loss_scale_changes_nothing_that_is_finite():
    """Scales are powers of two: the weights are those without a scale, to the bit."""
    plain = run(regressor(lambda: optimizers.SGD(0.05, momentum=0.9)), FIT, on(3)).model
    assert un.fingerprint(weights(run(regressor(scaled()), FIT, on(3)).model)) == un.fingerprint(weights(plain))


def test_a_loss_scale_survives_saving(tmp_path):
    """Scale and counter are in the file, and the next steps are those of the model that went on, to the bit."""
    model = run(regressor(scaled(growth=4)), FIT, on(3)).model
    assert counters(model) == (32.0, 1.0, 5.0)
    model.save(tmp_path / "model.keras")
    with on(1).scope():
        opened = keras.saving.load_model(tmp_path / "model.keras")
    assert counters(opened) == counters(model)
    for one in (model, opened):
        FIT(one)
    assert counters(model) == (64.0, 2.0, 10.0)
    assert un.fingerprint(opened) == un.fingerprint(model)


@pytest.mark.slow
def test_clipping_and_averages_inside_a_loss_scale():
    """The inner optimizer clips the unscaled sum and averages the weights, as in plain Keras."""
    make = regressor(scaled(global_clipnorm=0.5, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2))
    assert_equals_keras(make, FIT)


@pytest.mark.parametrize("dtype", slow("mixed_float16", "mixed_bfloat16"))
@pytest.mark.parametrize("layer", [layers.LSTM, *slow(layers.GRU)])
def test_recurrent_layers_in_half_precision(layer, dtype):
    """Within one percent of plain Keras in the same precision."""

    def make():
        model = keras.Sequential([keras.Input((4, 3)), layer(3, dtype=dtype), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), loss)
        return model

    fit = fitting(rows(19, 4, 3), labels(19, 3), batch_size=8)
    plain, ours = run(make, fit), assert_same_bits(make, fit, replicas=4)
    assert distance(ours.model, plain.model) <= HALF_TOLERANCE
    np.testing.assert_allclose(ours.logs["loss"], plain.logs["loss"], rtol=HALF_TOLERANCE)


class Output(keras.losses.Loss):
    """The output itself, added up."""

    def call(self, y_true, y_pred):
        return y_pred


@pytest.mark.parametrize("dtype", ["float16", *slow("bfloat16")])
def test_gradients_of_half_precision_are_added_in_full(dtype):
    """Four replicas of 16384 and four of the opposite: each half is too large for float16, and the whole is 128."""

    def make():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=dtype)])
        model.compile(optimizers.SGD(1.0), Output(reduction="sum"))
        return model

    x = np.array([16384] * 4 + [-16384] * 3 + [-16256], "float32")[:, None]
    for strategy in (on(1), on(3)):
        model = run(make, fitting(x, np.zeros_like(x), batch_size=8), strategy).model
        assert float(model.trainable_variables[0].value[0, 0]) == -128.0


# --- batch statistics -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frozen_batch_normalization_is_plain_keras():
    """It keeps its statistics and looks at no batch: the layers around it train as on whole batches."""

    def make():
        norm = layers.BatchNormalization(
            trainable=False, moving_mean_initializer="random_normal", gamma_initializer="random_normal"
        )
        model = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), norm, layers.Dense(2)])
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    fresh, plain = run(make, lambda model: model).model, assert_equals_keras(make, FIT).model
    ours = run(make, FIT, on(3)).model
    for model in (plain, ours):
        assert un.fingerprint(model.layers[1]) == un.fingerprint(fresh.layers[1])


def test_batch_normalization_with_replicas_without_rows():
    """A batch of three rows for eight replicas: the statistics of three replicas, weighted by rows, and no nan."""

    def make():
        model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(momentum=0.5), layers.Dense(2)])
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    layer = assert_same_bits(make, fitting(X[:3], Y[:3], batch_size=8)).model.layers[0]
    np.testing.assert_allclose(layer.moving_mean.value, 0.5 * X[:3].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.value, np.full(5, 0.5), rtol=1e-5)  # rows alone have no variance


@pytest.mark.slow
def test_batch_normalization_under_a_mask():
    """Masked positions are in no statistics; a replica whose rows are all masked spoils nothing."""
    words = np.arange(43 * 4).reshape(43, 4) % 11 + 1
    words[np.arange(4) >= np.arange(43)[:, None] % 5] = 0  # rows of 0, 1, .. 4 words

    def make():
        model = keras.Sequential([layers.Embedding(12, 4, mask_zero=True), layers.BatchNormalization(), layers.Dense(3)])
        model.compile(optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    ours = assert_same_bits(make, fitting(words, labels(43, 3, 4), batch_size=10, epochs=2))
    assert all(np.isfinite(value).all() for value in weights(ours.model))


# --- steps per execution ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", slow(2, 3, 50))
def test_steps_per_execution_that_do_not_divide_the_epoch(steps):
    """Five batches, three epochs with validation: plain Keras' training, with the same bits on every placement."""
    fit = fitting(X, Y, batch_size=10, epochs=3, validation_data=(X[:23], Y[:23]), validation_batch_size=4)
    assert_equals_keras(regressor(lambda: optimizers.SGD(0.1), steps_per_execution=steps, metrics=["mae"]), fit)


@pytest.mark.parametrize("steps", [3, *slow(2)])
def test_steps_per_execution_and_steps_per_epoch(steps):
    """Epochs of four steps run as many steps, over the same rows, as in plain Keras."""
    fit = fitting(X, Y, batch_size=3, epochs=2, steps_per_epoch=4)
    assert_equals_keras(regressor(lambda: optimizers.SGD(0.1, momentum=0.5), steps_per_execution=steps), fit)


@pytest.mark.filterwarnings("ignore:The loss is (nan|inf) in ")
def test_a_bad_step_within_an_execution():
    """Of five steps in one call the third is skipped, and the two after it count on the halved scale."""
    x = X.copy()
    x[2 * BATCH + 1] = np.nan
    make = regressor(scaled(), steps_per_execution=5)
    ours, plain = assert_same_bits(make, fitting(x, Y, batch_size=BATCH)), run(make, fitting(x, Y, batch_size=BATCH))
    assert counters(ours.model) == counters(plain.model) == (32.0, 0.0, 4.0)
    assert distance(ours.model, plain.model) <= 1e-6
