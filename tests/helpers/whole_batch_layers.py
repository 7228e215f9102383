"""Layers that look at the whole batch: by losses of their own, and by state that they assign in the forward pass."""

from __future__ import annotations

import jax
import keras
from keras import layers as L  # noqa: N812
from keras import ops

from whole_batch_losses import CLASSES


def mlp(**options):
    return keras.Sequential([L.Input((8,)), L.Dense(8, "tanh", **options), L.Dense(CLASSES)])


def between(layer):
    """Return a function that makes a small net around such a layer."""
    return lambda: keras.Sequential([L.Input((8,)), L.Dense(8), layer(), L.Dense(CLASSES)])


class Experts(L.Layer):
    """A balance of experts: a product of two means over the batch."""

    def build(self, shape):
        self.router = self.add_weight(shape=(shape[-1], 4))
        self.experts = self.add_weight(shape=(4, shape[-1], shape[-1]))

    def call(self, x):
        gates = ops.softmax(x @ self.router)
        share = ops.mean(ops.one_hot(ops.argmax(gates, -1), 4), 0)
        self.add_loss(4 * ops.sum(share * ops.mean(gates, 0)))
        return x + ops.einsum("bk,bd,kde->be", gates, x, self.experts)


class Queue(L.Layer):
    """A queue of rows, as contrastive learning with a memory keeps it, and the mean of the rows that the layer has seen."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(32, shape[-1]), initializer="zeros", trainable=False)
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.place = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x):
        self.rows.assign(jax.lax.dynamic_update_slice(self.rows.value, jax.lax.stop_gradient(x), (self.place.value, 0)))
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        self.place.assign(self.place + ops.shape(x)[0])
        return x / self.largest

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


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


class Quantized(L.Layer):
    """Eight bits of the largest number so far, which decays, and a gradient that passes straight through."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.largest.assign(ops.maximum(0.99 * self.largest, ops.max(ops.abs(ops.stop_gradient(x)))))
        scale = self.largest / 127
        return x + ops.stop_gradient(ops.round(x / scale) * scale - x)


class Renewed(L.Layer):
    """Rows without their mean, which is taken anew in each second step alone."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x):
        self.steps.assign(self.steps + 1)
        old = ops.convert_to_tensor(self.mean)
        self.mean.assign(ops.cond(self.steps % 2 == 0, lambda: ops.mean(ops.stop_gradient(x), axis=0), lambda: old))
        return x - self.mean


class CentredInTraining(L.Layer):
    """Rows that see each other in training alone."""

    def call(self, x, training=False):
        return x - ops.mean(x, axis=0) if training else x


class OfOneReplica(L.Layer):
    """Scales of the rows, whose rule asks for the sum of the first replica's."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False, aggregation="only_first_replica")

    def call(self, x):
        self.scale.assign(0.9 * self.scale + ops.sum(ops.stop_gradient(x) ** 2, axis=0))
        return x / ops.sqrt(self.scale)


class Capacity(L.Layer):
    """Experts that take the first rows alone of those that want them."""

    def build(self, shape):
        self.router = self.add_weight(shape=(shape[-1], 3))
        self.experts = self.add_weight(shape=(3, shape[-1], shape[-1]))

    def call(self, x):
        gates = ops.softmax(x @ self.router)
        chosen = ops.one_hot(ops.argmax(gates, -1), 3)
        taken = chosen * ops.cast(ops.cumsum(chosen, 0) <= 6, "float32")
        return x + ops.einsum("bk,bd,kde->be", taken * gates, x, self.experts)


class OverRows(L.Layer):
    """Attention from each row of a batch to all others."""

    def build(self, shape):
        self.attention = L.MultiHeadAttention(2, 4)
        self.attention.build((1, None, shape[-1]), (1, None, shape[-1]))

    def call(self, x):
        return x + self.attention(x[None], x[None])[0]

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Doubled(L.Layer):
    """A number of the whole batch, doubled until it is large enough: a loop at the end of the step, which never ends on zero."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        smallest = ops.sort(ops.stop_gradient(ops.abs(x)), axis=0)[0, 0]
        self.scale.assign(ops.while_loop(lambda v: v < 100, lambda v: 2 * v, smallest))
        return x
