"""Losses and layers that look at the whole batch, as guides have them, in phases: with the numbers of the whole batch."""

from __future__ import annotations

import keras
import pytest
from keras import layers as L  # noqa: N812
from keras import ops

from sizes import mostly_slow
from whole_batch_of_phases import CLASSES, CLOSE, SPARSE, compare, make_batch, make_step, mlp


def barlow_twins(y, z):
    """Two halves of the features stand for two views."""
    first, second = ((v - ops.mean(v, 0)) / (ops.std(v, 0) + 1e-4) for v in (z[:, :2], z[:, 2:4]))
    correlation = ops.transpose(first) @ second / ops.cast(ops.shape(z)[0], "float32")
    return ops.sum((correlation - ops.eye(2)) ** 2)


def distances(z):
    squares = ops.sum(z * z, -1)
    return ops.sqrt(ops.maximum(squares[:, None] - 2 * z @ ops.transpose(z) + squares[None], 1e-6))


def hardest_triplets(y, z):
    labels = ops.reshape(ops.cast(y, "int32"), (-1,))
    same = ops.cast(labels[:, None] == labels[None], "float32")
    between = distances(z)
    return ops.mean(ops.relu(ops.max(between * same, 1) - ops.min(between + 1e3 * same, 1) + 1.0))


def negatives_of_the_batch(y, z):
    """The other rows of the batch are the wrong answers."""
    logits = z[:, :2] @ ops.transpose(z[:, 2:4])
    return ops.mean(ops.logsumexp(logits, -1) - ops.sum(z[:, :2] * z[:, 2:4], -1))


def supervised_contrast(y, z):
    z = z / ops.sqrt(ops.sum(z * z, -1, keepdims=True) + 1e-9)
    labels = ops.reshape(y, (-1,))
    same = ops.cast(labels[:, None] == labels[None], "float32")
    return -ops.mean(ops.sum(same / ops.sum(same, 1, keepdims=True) * ops.log_softmax(z @ ops.transpose(z) / 0.1), -1))


class Sampling(L.Layer):
    """The bottleneck of a variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x):
        mean, log_variance = x[:, :4], x[:, 4:]
        self.add_loss(-0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Codebook(L.Layer):
    """Vectors that follow the rows nearest to them by moving averages, and a gradient that passes straight through."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(6, shape[-1]), initializer=keras.initializers.RandomNormal(seed=5), trainable=False)
        self.counts = self.add_weight(shape=(6,), initializer="ones", trainable=False)

    def call(self, x):
        codes = ops.convert_to_tensor(self.codes)
        nearest = ops.one_hot(ops.argmin(ops.sum((x[:, None] - codes[None]) ** 2, -1), -1), 6)
        quantized = nearest @ codes
        counts = 0.9 * self.counts + 0.1 * ops.sum(nearest, 0)
        self.codes.assign(0.9 * codes + 0.1 * ops.transpose(nearest) @ ops.stop_gradient(x) / (counts[:, None] + 1e-3))
        self.counts.assign(counts)
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(quantized) - x) ** 2))
        return x + ops.stop_gradient(quantized - x)


class Center(L.Layer):
    """A center of the outputs of a teacher: the new one is used in the same pass."""

    def build(self, shape):
        self.center = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x):
        self.center.assign(0.9 * self.center + 0.1 * ops.mean(ops.stop_gradient(x), 0))
        return ops.softmax((x - self.center) / 0.5)


def between(layer):
    return lambda: keras.Sequential([L.Input((8,)), L.Dense(8), layer(), L.Dense(CLASSES)])


FAMILIES = {
    "barlow twins": (mlp, barlow_twins),
    "hardest triplets": (mlp, hardest_triplets),
    "negatives of the batch": (mlp, negatives_of_the_batch),
    "supervised contrast": (mlp, supervised_contrast),
    "variational autoencoder": (between(Sampling), SPARSE),
    "codebook": (between(Codebook), SPARSE),
    "center": (between(Center), SPARSE),
}


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "hardest triplets"))
def test_a_family_has_the_numbers_of_the_whole_batch(family, rng):
    make_model, loss = FAMILIES[family]
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    batch = make_batch(model, rng)
    model.train_on_batch(*batch)
    step, state = make_step(model)
    error, _ = compare(lambda state, batch: step(state, batch)[::-1], state, batch)
    assert error < CLOSE
