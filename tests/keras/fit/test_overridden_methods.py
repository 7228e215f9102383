"""Methods of Keras' models that a class overrides beside its steps: they are called as in plain Keras, or refused. Outputs of any shape."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

from sizes import cases, mostly_slow, slow
from trainings import assert_equals_keras, fitting, on, rows, run

X, Y = rows(24, 3), rows(24, 1, seed=1)


def classifier(cls):
    keras.utils.set_random_seed(0)
    return cls([keras.Input((3,)), layers.Dense(4, "softmax")])


class OwnPredict(keras.Sequential):
    """`predict` takes other arguments than Keras', and gives Keras other rows than it gets."""

    def predict(self, x, threshold=None, **kwargs):
        scores = super().predict(np.asarray(x) / 2, verbose=0, **kwargs)
        return scores if threshold is None else scores > threshold


@pytest.mark.parametrize("options", [{"threshold": 0.3}, *slow({}, {"batch_size": 8})])
def test_predict(options):
    plain = classifier(OwnPredict).predict(X, **options)
    with on(1, 4).scope():
        model = classifier(OwnPredict)
    np.testing.assert_allclose(model.predict(X, **options), plain, rtol=1e-6)


class Doubled(keras.Sequential):
    def compute_loss_and_updates(self, *args, **kwargs):
        loss, (unscaled, *more) = super().compute_loss_and_updates(*args, **kwargs)
        return 2 * loss, (2 * unscaled, *more)


class Shifted(keras.Sequential):
    def stateless_call(self, *args, **kwargs):
        outputs, *more = super().stateless_call(*args, **kwargs)
        return (outputs + 1.0, *more)


class Halved(keras.Sequential):
    def stateless_compute_loss(self, *args, **kwargs):
        loss, variables = super().stateless_compute_loss(*args, **kwargs)
        return loss / 2, variables


@pytest.mark.parametrize("cls", [Doubled, Shifted, *slow(Halved)])
def test_parts_of_a_step(cls):
    def make():
        model = cls([keras.Input((3,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    fit = fitting(X, Y, batch_size=8, validation_data=(X[:8], Y[:8]))
    plain = assert_equals_keras(make, fit, replicas=cases((4,), (1, 4)))
    with on(1, 4).scope():
        model = make()
    model.set_weights(plain.model.get_weights())
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.model.predict(X, verbose=0), rtol=1e-6)


class Labels(keras.Sequential):
    def make_predict_function(self, force=False):
        super().make_predict_function(force=force)
        scores = self.predict_function

        def labels(state, iterator):
            outputs, state = scores(state, iterator)
            return ops.argmax(outputs, axis=-1), state

        self.predict_function = labels


def test_a_function_of_a_loop_is_not_made_by_the_class():
    with on(1, 4).scope():
        model = classifier(Labels)
    with pytest.raises(TypeError, match="The class Labels overrides make_predict_function.* Override predict_step instead"):
        model.predict(X, verbose=0)


class Codes(keras.Model):
    """Returns weights of its own, or each row several times."""

    def __init__(self, length, times=1):
        super().__init__()
        self.codes = self.add_weight(shape=(length, 3), name="codes")
        self.times = times

    def call(self, x):
        return ops.repeat(x, self.times, axis=0) if self.times > 1 else ops.convert_to_tensor(self.codes)


class Pairs(keras.Model):
    """A table of all pairs of rows."""

    def call(self, x):
        return ops.matmul(x, ops.transpose(x))


class Turned(keras.Model):
    """Rows on the second axis, and their number."""

    def call(self, x):
        return {"rows": ops.transpose(x), "number": ops.full((1,), ops.shape(x)[0])}


OUTPUTS = {
    "without rows": lambda: Codes(3),
    "as long as a replica's rows": lambda: Codes(2),
    "each row twice": lambda: Codes(3, times=2),
    "all pairs of rows": Pairs,
    "rows on another axis": Turned,
}


@pytest.mark.parametrize("what", mostly_slow(OUTPUTS, "all pairs of rows", "rows on another axis"))
def test_outputs_of_any_shape_are_those_of_keras(what):
    """Also of batches with fewer rows than replicas."""

    def predict(strategy, count):
        model = run(OUTPUTS[what], lambda model: None, strategy).model
        return model.predict(X[:count], verbose=0)

    for count in (10, 3):
        plain, one, three = (predict(strategy, count) for strategy in (None, on(1, 4), on(3, 4)))
        jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6), one, plain)
        jax.tree.map(np.testing.assert_array_equal, three, one)
