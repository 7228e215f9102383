"""What an optimizer does happens once a step, on the gradient summed over all replicas."""

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers
from keras.optimizers import schedules

import unisono as un
from sizes import BATCH, ROWS, cases, mostly_slow, slow
from trainings import (
    ADAM_TOLERANCE,
    PLACEMENTS,
    SGD_TOLERANCE,
    assert_close_logs,
    assert_equals_keras,
    assert_same_bits,
    distance,
    fitting,
    net,
    on,
    rows,
    run,
    tanh,
)

X, Y = rows(ROWS, 5), 3 * rows(ROWS, 2, seed=1)
FIT = fitting(X, Y, batch_size=BATCH)


def regressor(optimizer, **options):
    return net(tanh(7), 2, optimizer=optimizer, **options)


def decayed():
    optimizer = optimizers.AdamW(0.02, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def several():
    """One optimizer for the kernels, another for the rest."""
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.02), {".*/kernel": optimizers.SGD(0.1, momentum=0.9)})
    )


def by_path(made):
    """A function that picks a variable's optimizer."""
    return lambda variable: made.setdefault("kernel" in variable.path, optimizers.Adam(0.02))


class Doubled(optimizers.SGD):
    """A user's optimizer that adds one to the gradients and doubles them."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([2 * (g + 1) for g in grads], trainable_variables)


OPTIMIZERS = {
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Adagrad": lambda: optimizers.Adagrad(0.05, global_clipnorm=0.3),
    "Adam": lambda: optimizers.Adam(0.02, amsgrad=True),
    "AdamW": decayed,
    "Adamax": lambda: optimizers.Adamax(0.02),
    "Ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
    "Lamb": lambda: optimizers.Lamb(0.02),
    "Lion": lambda: optimizers.Lion(0.01),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.05, momentum=0.9)),
    "MultiOptimizer": several,
    "MultiOptimizer of a function": lambda: optimizers.MultiOptimizer(by_path({})),
    "Muon": lambda: optimizers.Muon(0.02, adam_lr_ratio=0.5),
    "Nadam": lambda: optimizers.Nadam(0.02),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "SGD": lambda: optimizers.SGD(0.1, loss_scale_factor=1024.0),
    "SGD with momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "SGD, clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.3),
    "SGD, clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.05),
    "SGD, global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "SGD, weight decay": lambda: optimizers.SGD(0.05, weight_decay=0.1),
    "SGD, averages": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7),
    "SGD, averages in place of weights": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.02),
    "a user's own": lambda: Doubled(0.02),
}


class Warming(schedules.LearningRateSchedule):
    """A user's own schedule, of the step alone."""

    def __call__(self, step):
        return 0.02 * (keras.ops.cast(step, "float32") + 1)

    def get_config(self):
        return {}


SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.2, 2, t_mul=1.5),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.2, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.2, 2, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([1, 3], [0.2, 0.1, 0.05]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.2, 2, 0.01, cycle=True),
    "a schedule of a user's": Warming,
}


def test_every_optimizer_and_schedule_of_keras_is_here():
    """One that a new Keras brings is tried here before anyone trusts it."""
    kinds = {name for name, kind in vars(optimizers).items() if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)}
    assert kinds - {"Optimizer"} <= {name.split()[0] for name in OPTIMIZERS}
    assert {name for name, kind in vars(schedules).items() if isinstance(kind, type)} - {
        "LearningRateSchedule"
    } <= SCHEDULES.keys()


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS | SCHEDULES, "SGD with momentum", "MultiOptimizer", "CosineDecay"))
def test_five_steps_of_an_optimizer(name):
    """They are those of whole batches in plain Keras, replicas are no steps; slots and weights are equal to the bit."""
    make = OPTIMIZERS.get(name) or (lambda: optimizers.SGD(SCHEDULES[name]()))
    tolerance = SGD_TOLERANCE if "SGD" in name or name in SCHEDULES else ADAM_TOLERANCE
    ours = assert_equals_keras(regressor(make), FIT, tolerance=tolerance).model
    assert int(getattr(ours.optimizer, "inner_optimizer", ours.optimizer).iterations.value) == 5


class Two(layers.Layer):
    def build(self, shape):
        one = keras.initializers.Constant(1.0)
        self.first, self.second = (self.add_weight(shape=(), initializer=one) for _ in range(2))

    def call(self, x):
        return x[:, :1] * self.first + x[:, 1:] * self.second


class Output(keras.losses.Loss):
    """The output itself, added up."""

    def call(self, y_true, y_pred):
        return y_pred


@pytest.mark.parametrize("clipping", ["clipnorm", *slow("clipvalue")])
def test_clipping_comes_after_the_sum(clipping):
    """Large gradients of opposite signs cancel in the sum: they are not clipped one by one."""
    make = net(Two, loss=Output(reduction="sum"), optimizer=lambda: optimizers.SGD(1.0, **{clipping: 2.0}))
    x = np.array([[100.0, 9.0], [-101.5, 1.0]], "float32")  # sums: -1.5, not to be clipped; 10, clipped to 2
    for strategy in cases((None, on(1, 2), on(3)), (None, on(1, 1), on(2, 2), on(1, 2), on(3))):
        model = run(make, fitting(x, np.zeros((2, 1)), batch_size=2), strategy).model
        assert [float(w.value) for w in model.trainable_variables] == [2.5, -1.0]


@pytest.mark.parametrize("dtype", ["float16", *slow("bfloat16")])
def test_gradients_of_half_precision_are_added_in_full(dtype):
    """Four replicas of 16384 and four of the opposite: each half is too large for float16, and the whole is 128."""
    one = lambda: layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=dtype)
    make = net(one, loss=Output(reduction="sum"), optimizer=lambda: optimizers.SGD(1.0))
    x = np.array([16384] * 4 + [-16384] * 3 + [-16256], "float32")[:, None]
    for strategy in (on(1), on(3)):
        model = run(make, fitting(x, np.zeros_like(x), batch_size=8), strategy).model
        assert float(model.trainable_variables[0].value[0, 0]) == -128.0


@pytest.mark.filterwarnings("ignore:The loss is (nan|inf) in ")
def test_not_a_number_reaches_the_weights_only_through_the_sum():
    """A clipped infinite gradient gives what plain Keras gives, with equal bits everywhere."""
    x = X.copy()
    x[0, 0] = np.inf
    fit = fitting(x, Y, batch_size=BATCH)
    ours = assert_same_bits(regressor(lambda: optimizers.SGD(0.1, clipvalue=0.1)), lambda model: fit(model) and None)
    assert any(bool(ops.any(ops.isnan(w.value))) for w in ours.model.weights)


ACCUMULATING = {
    "alone": lambda inner: inner,
    "the wrapper's optimizer": optimizers.LossScaleOptimizer,
    "one of several": lambda inner: optimizers.MultiOptimizer(optimizers.OptimizerMap(inner)),
    "what a function picks": lambda inner: optimizers.MultiOptimizer(lambda _: inner),
}


@pytest.mark.parametrize("of", ACCUMULATING)
def test_accumulation_of_the_optimizers_own_is_refused(of):
    """However deep it is, the error says the line to write instead, and how the batch size changes."""
    make = lambda: ACCUMULATING[of](optimizers.SGD(0.1, gradient_accumulation_steps=6))
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=6[\s\S]*accumulate=6\).*batch_size=6 times"):
        run(regressor(make), FIT, on(3))


# What happens to an optimizer and its weights between fits.


def rate_is_set(model):
    """On the optimizer, and on its variable."""
    FIT(model)
    model.optimizer.learning_rate = 0.03
    FIT(model)
    model.optimizer.learning_rate.assign(0.3)
    return FIT(model)


def layer_is_frozen(model):
    FIT(model)
    model.layers[0].trainable = False
    model.compile(optimizers.SGD(0.1), "mse")
    return FIT(model)


def test_the_rate_that_is_set_is_the_rate_that_is_used():
    assert_equals_keras(regressor(lambda: optimizers.SGD(0.1)), rate_is_set, tolerance=1e-5)


def test_a_layer_frozen_between_two_fits():
    """After a new compile() the frozen layer keeps its bits, and the rest trains as in plain Keras."""
    make = regressor(lambda: optimizers.SGD(0.1))
    ours, plain = assert_same_bits(make, layer_is_frozen, PLACEMENTS), run(make, layer_is_frozen)
    assert distance(ours.model, plain.model) <= 1e-5
    assert un.fingerprint(run(make, FIT, on(3)).model.layers[0]) == un.fingerprint(ours.model.layers[0])


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
