"""A model's own `train_step(state, data)`, in the form that Keras documents for JAX."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

from sizes import BATCH, ROWS, cases, slow
from trainings import assert_equals_keras, assert_same_bits, fitting, labels, on, rows, run

X, Y = rows(ROWS, 5), labels(ROWS, 3)
WEIGHTS = np.abs(rows(ROWS, seed=3))


class OwnStep(keras.Model):
    """As the guide of Keras writes it."""

    statistics = True

    def __init__(self, dropout=0.0, **options):
        super().__init__(**options)
        normalization = [layers.BatchNormalization()] if self.statistics else []
        self.inner = keras.Sequential([layers.Dense(8, "tanh"), *normalization, layers.Dropout(dropout)])
        self.out = layers.Dense(3)

    def call(self, x, training=False):
        return self.out(self.inner(x, training=training))

    def compute_loss_and_updates(self, weights, others, x, y, sample_weight=None, training=False):
        y_pred, others = self.stateless_call(weights, others, x, training=training)
        return self.compute_loss(x, y, y_pred, sample_weight), (y_pred, others)

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, others)), gradients = gradient(weights, others, x, y, sample_weight, training=True)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        metrics, logs = self.updated_metrics(metrics, loss, y, y_pred)
        return logs, (weights, others, slots, metrics)

    def test_step(self, state, data):
        weights, others, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, (y_pred, others) = self.compute_loss_and_updates(weights, others, x, y, sample_weight)
        metrics, logs = self.updated_metrics(metrics, loss, y, y_pred)
        return logs, (weights, others, metrics)

    def updated_metrics(self, values, loss, y, y_pred):
        logs, new = {}, []
        for metric in self.metrics:
            mine = values[len(new) : len(new) + len(metric.variables)]
            if metric.name == "loss":
                mine = metric.stateless_update_state(mine, loss)
                logs["loss"] = metric.stateless_result(mine)
            else:
                mine = metric.stateless_update_state(mine, y, y_pred)
                logs |= metric.stateless_result(mine)
            new += mine
        return new, logs


def own(dropout=0.0, kind=OwnStep):
    def make():
        model = kind(dropout)
        model.compile(
            keras.optimizers.SGD(0.1, global_clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    return make


def test_every_placement_has_the_same_bits():
    fit = fitting(X, Y, batch_size=BATCH, sample_weight=WEIGHTS, validation_data=(X, Y))
    assert_same_bits(own(dropout=0.3), fit, devices=cases((1, 3), (1, 3, 8)))


class WithoutStatistics(OwnStep):
    statistics = False


def test_the_sum_over_replicas_is_the_big_batch():
    """Ragged batches and replicas without rows included, for the weights and the means that the step tracks itself."""
    assert_equals_keras(own(kind=WithoutStatistics), fitting(X, Y, batch_size=BATCH), devices=(3,))


class Nested(WithoutStatistics):
    """As Keras' guide for JAX returns logs: those of the metrics of compile() are a dict in the dict."""

    def updated_metrics(self, values, loss, y, y_pred):
        logs, new = {}, []
        for metric in self.metrics:
            mine = values[len(new) : len(new) + len(metric.variables)]
            fed = (loss,) if metric.name == "loss" else (y, y_pred)
            mine = metric.stateless_update_state(mine, *fed)
            logs[metric.name] = metric.stateless_result(mine)
            new += mine
        return new, logs


@pytest.mark.parametrize("replicas", [8, *slow(1)])
def test_logs_in_logs_stand_beside_the_others(replicas):
    assert_equals_keras(own(kind=Nested), fitting(X, Y, batch_size=BATCH), replicas=(replicas,), devices=(3,))


class Doubling(OwnStep):
    def predict_step(self, state, data):
        outputs, others = super().predict_step(state, data)
        return {"doubled": 2 * outputs, "class": keras.ops.argmax(outputs, axis=-1)}, others


def test_a_predict_step_of_the_models_own():
    """What it returns are the outputs, also with random state that it moves on."""
    predicted = lambda model: model.predict(X, batch_size=BATCH, verbose=0)
    plain, one, three = (run(own(kind=Doubling), lambda model: None, on_).model for on_ in (None, on(1), on(3)))
    wanted, found, other = map(predicted, (plain, one, three))
    assert wanted.keys() == found.keys()
    for name in wanted:
        assert np.array_equal(found[name], other[name])
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_a_predict_step_without_a_state_is_refused():
    class Bare(OwnStep):
        def predict_step(self, state, data):
            return super().predict_step(state, data)[0]

    model = run(own(kind=Bare), lambda model: None, on(1)).model
    with pytest.raises(
        ValueError, match="predict_step must return outputs and state.*End it with: return outputs, non_trainable_variables"
    ):
        model.predict(X, verbose=0)


def spoiled(how):
    class Spoiled(OwnStep):
        def train_step(self, state, data):
            return how(self, state, data)

    return own(kind=Spoiled)


def differentiated(model, state, data):
    """As networks do that train each other."""
    weights, others, slots, metrics = state
    gradient = jax.value_and_grad(lambda weights: sum(keras.ops.sum(w) for w in weights))
    weights, slots = model.optimizer.stateless_apply(slots, gradient(weights)[1], weights)
    gradient(weights)
    return {}, (weights, others, slots, metrics)


def changed(model, state, data):
    weights, others, slots, metrics = state
    new, slots = model.optimizer.stateless_apply(slots, [keras.ops.zeros_like(w) for w in weights], weights)
    return {}, ([*new[:-1], weights[-1]], others, slots, metrics)


@pytest.mark.parametrize("how", [differentiated, *slow(changed)])
def test_a_step_may_do_what_it_likes(how):
    """Several updates, updated weights that are read again, weights that are set by hand: as plain Keras on the whole batch."""
    assert_equals_keras(spoiled(how), fitting(X, Y, batch_size=8, epochs=1), replicas=(3,))
