"""Methods of Keras' models that a class overrides beside its steps: they are called as in plain Keras, or refused."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from sizes import cases, slow
from trainings import assert_equals_keras, fitting, on, rows

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
    def __init__(self, length, times=1):
        super().__init__()
        self.codes = self.add_weight(shape=(length, 3), name="codes")
        self.times = times

    def call(self, x):
        return ops.repeat(x, self.times, axis=0) if self.times > 1 else ops.convert_to_tensor(self.codes)


def test_outputs_without_rows_are_refused():
    """Also where their length is a multiple of a replica's rows."""
    for length in (3, 4):
        with on(1, 4).scope():
            model = Codes(length)
        with pytest.raises(ValueError, match=rf"output of shape \({length}, 3\) for 2 rows.*must count rows"):
            model.predict(X[:8], verbose=0)
    with on(1, 4).scope():
        model = Codes(3, times=2)
    np.testing.assert_array_equal(model.predict(X[:8], verbose=0), np.repeat(X[:8], 2, axis=0))


class Pairs(keras.Model):
    """A table of all pairs of rows."""

    def call(self, x):
        return ops.matmul(x, ops.transpose(x))


@pytest.mark.parametrize("rows", [4, *slow(16)])
def test_outputs_with_another_axis_of_rows_are_refused(rows):
    """A replica's tables would be another output; four rows are one for each replica."""
    with on(1, 4).scope():
        model = Pairs()
    size = rows // 4
    shapes = rf"output of shape \({size}, {size}\) for {size} rows, and of shape \({2 * size}, {2 * size}\) for {2 * size}"
    with pytest.raises(ValueError, match=f"{shapes}: another axis than the first counts rows"):
        model.predict(X[:rows], verbose=0)
    with on(1, 1).scope():
        model = Pairs()
    assert model.predict(X[:rows], verbose=0).shape == (rows, rows)
