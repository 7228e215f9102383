"""What an optimizer does happens once a step, on the gradient summed over all replicas."""

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers

import unisono as un
from sizes import BATCH, ROWS, cases, slow
from trainings import ADAM_TOLERANCE, PLACEMENTS, assert_equals_keras, assert_same_bits, distance, fitting, on, rows, run

X, Y = rows(ROWS, 5), 3 * rows(ROWS, 2, seed=1)


def regressor(optimizer, **options):
    def make():
        model = keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(2)])
        model.compile(optimizer(), "mse", **options)
        return model

    return make


def decayed():
    optimizer = optimizers.AdamW(0.02, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "momentum": (lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True), 1e-6),
    "clipnorm": (lambda: optimizers.SGD(0.1, clipnorm=0.3), 1e-6),
    "clipvalue": (lambda: optimizers.SGD(0.1, clipvalue=0.05), 1e-6),
    "global_clipnorm": (lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), 1e-6),
    "weight decay": (lambda: optimizers.SGD(0.05, weight_decay=0.1), 1e-6),
    "a schedule": (lambda: optimizers.SGD(optimizers.schedules.CosineDecay(0.2, 4, warmup_steps=2, warmup_target=0.3)), 1e-6),
    "moving average": (lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2), 1e-6),
    "Adam": (lambda: optimizers.Adam(0.02, amsgrad=True), ADAM_TOLERANCE),
    "AdamW": (decayed, ADAM_TOLERANCE),
    "RMSprop": (lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True), ADAM_TOLERANCE),
    "Adagrad with global clipping": (lambda: optimizers.Adagrad(0.05, global_clipnorm=0.3), ADAM_TOLERANCE),
}


@pytest.mark.parametrize("name", [*list(OPTIMIZERS)[:1], *slow(*list(OPTIMIZERS)[1:])])
def test_five_steps_of_an_optimizer(name):
    """Weights after five steps are those of whole batches in plain Keras; slots and weights are equal to the bit."""
    optimizer, tolerance = OPTIMIZERS[name]
    devices = (1, 3) if name in ("momentum", "global_clipnorm", "moving average", "Adam") else (3,)
    assert_equals_keras(regressor(optimizer), fitting(X, Y, batch_size=BATCH), devices=devices, tolerance=tolerance)


@pytest.mark.slow
def test_one_replica_of_adam():
    """One replica is plain Keras, the optimizer's slots included."""
    plain = assert_equals_keras(
        regressor(optimizers.Adam), fitting(X, Y, batch_size=BATCH), replicas=(1,), tolerance=ADAM_TOLERANCE
    ).model
    ours = run(regressor(optimizers.Adam), fitting(X, Y, batch_size=BATCH), on(8)).model
    assert [v.shape for v in ours.optimizer.variables] == [v.shape for v in plain.optimizer.variables]
    ours, theirs = (np.concatenate([np.ravel(v.value) for v in model.optimizer.variables]) for model in (ours, plain))
    assert np.linalg.norm(ours - theirs) <= ADAM_TOLERANCE * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("clipping", "first", "second"), [({"clipnorm": 2.0}, 2.5, -1.0), *slow(({"clipvalue": 2.0}, 2.5, -1.0))]
)
def test_clipping_comes_after_the_sum(clipping, first, second):
    """Large gradients of opposite signs cancel in the sum: they are not clipped one by one."""

    class Two(layers.Layer):
        def build(self, shape):
            self.first = self.add_weight(shape=(), initializer=keras.initializers.Constant(1.0))
            self.second = self.add_weight(shape=(), initializer=keras.initializers.Constant(1.0))

        def call(self, x):
            return x[:, :1] * self.first + x[:, 1:] * self.second

    class Sum(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred

    def make():
        model = keras.Sequential([keras.Input((2,)), Two()])
        model.compile(optimizers.SGD(1.0, **clipping), Sum(reduction="sum"))
        return model

    x = np.array([[100.0, 9.0], [-101.5, 1.0]], "float32")  # sums: -1.5, not to be clipped; 10, clipped to 2
    for strategy in cases((None, on(1, 2), on(3)), (None, on(1, 1), on(2, 2), on(1, 2), on(3))):
        model = run(make, fitting(x, np.zeros((2, 1)), batch_size=2), strategy).model
        assert [float(w.value) for w in model.trainable_variables] == [first, second]


class Doubled(optimizers.SGD):
    """A user's optimizer that adds one to the gradients and doubles them."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([2 * (g + 1) for g in grads], trainable_variables)


def test_a_transform_of_gradients_is_applied_once():
    """What a user's optimizer does to gradients is done to the sum, not to each replica's."""
    assert_equals_keras(regressor(lambda: Doubled(0.02)), fitting(X, Y, batch_size=BATCH))


def test_steps_are_counted_once():
    """Five batches are five iterations."""
    model = run(regressor(lambda: optimizers.Adam(0.01)), fitting(X, Y, batch_size=BATCH), on(3)).model
    assert int(model.optimizer.iterations.value) == 5


def test_the_rate_that_is_set_is_the_rate_that_is_used():
    """A rate set between two fits, on the optimizer or on its variable, takes effect as in plain Keras."""

    def fit(model):
        fitting(X, Y, batch_size=BATCH)(model)
        model.optimizer.learning_rate = 0.03
        fitting(X, Y, batch_size=BATCH)(model)
        model.optimizer.learning_rate.assign(0.3)
        return fitting(X, Y, batch_size=BATCH)(model)

    assert_equals_keras(regressor(lambda: optimizers.SGD(0.1)), fit, tolerance=1e-5)


def test_accumulation_of_the_optimizers_own_is_refused():
    """The error says the line to write instead, and how the batch size changes."""
    with pytest.raises(ValueError, match=r"accumulate=6\).*batch_size=6 times"):
        run(regressor(lambda: optimizers.SGD(0.1, gradient_accumulation_steps=6)), fitting(X, Y, batch_size=BATCH), on(3))


class Spare(layers.Layer):
    """Has weights that take no part in the output, before and after one that does."""

    def build(self, shape):
        self.before = self.add_weight(shape=(3,), initializer="ones")
        self.used = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.still = self.add_weight(shape=(2,), initializer="ones", trainable=False)
        self.after = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x * self.used


@pytest.mark.slow
def test_weights_without_a_gradient():
    """They keep their values under Adam, and no other weight gets their slots."""

    def make():
        model = keras.Sequential([Spare(), layers.Dense(4, trainable=False), layers.Dense(2)])
        model.compile(optimizers.Adam(0.02), "mse")
        return model

    model = assert_equals_keras(make, fitting(X, Y, batch_size=BATCH), tolerance=ADAM_TOLERANCE).model
    ours = run(make, fitting(X, Y, batch_size=BATCH), on(3)).model
    for found in (ours, model):
        spare = found.layers[0]
        assert np.asarray(spare.before.value).tolist() == [1.0] * 3
        assert np.asarray(spare.after.value).tolist() == [1.0] * 4
        assert not np.array_equal(np.asarray(spare.used.value), np.ones(5))


def test_a_layer_frozen_between_two_fits():
    """After a new compile() the frozen layer keeps its bits, and the rest trains as in plain Keras."""

    def fit(model):
        fitting(X, Y, batch_size=BATCH)(model)
        model.layers[0].trainable = False
        model.compile(optimizers.SGD(0.1), "mse")
        return fitting(X, Y, batch_size=BATCH)(model)

    plain = run(regressor(lambda: optimizers.SGD(0.1)), fit)
    ours = assert_same_bits(regressor(lambda: optimizers.SGD(0.1)), fit, PLACEMENTS)
    assert distance(ours.model, plain.model) <= 1e-5
    once = run(regressor(lambda: optimizers.SGD(0.1)), fitting(X, Y, batch_size=BATCH), on(3)).model
    assert un.fingerprint(once.layers[0]) == un.fingerprint(ours.model.layers[0])


@pytest.mark.filterwarnings("ignore:The loss is (nan|inf) in ")
def test_not_a_number_reaches_the_weights_only_through_the_sum():
    """A clipped infinite gradient gives what plain Keras gives, with equal bits everywhere."""
    x = X.copy()
    x[0, 0] = np.inf
    ours = assert_same_bits(
        regressor(lambda: optimizers.SGD(0.1, clipvalue=0.1)), lambda model: fitting(x, Y, batch_size=BATCH)(model) and None
    )
    assert any(bool(ops.any(ops.isnan(w.value))) for w in ours.model.weights)
