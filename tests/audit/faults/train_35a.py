"""Train a model with a step of its own that limits its gradients."""

import unisono as un

# isort: split
import jax
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(35)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = (x[:, :1] ** 3).astype("float32")


def limit(gradients, most):
    """Return the gradients, shortened."""
    return [gradient * most for gradient in gradients]


class Limited(keras.Model):
    def train_step(self, state, data):
        trainable, fixed, optimizer_variables, metrics = state
        inputs, wanted = data

        def loss_of(trainable, fixed):
            outputs, fixed = self.stateless_call(trainable, fixed, inputs, training=True)
            return ops.mean((outputs - wanted) ** 2), fixed

        (loss, fixed), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, fixed)
        gradients = limit(gradients, 0.1)
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        return {"loss": loss}, (trainable, fixed, optimizer_variables, metrics)


with strategy.scope():
    inputs = keras.Input((8,))
    hidden = layers.Dense(12, "relu")(inputs)
    model = Limited(inputs, layers.Dense(1)(hidden))
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=24, epochs=1, verbose=0)
