"""Train with mixed examples, in a loop."""

import random

import unisono as un
import keras
import numpy as np
from keras import layers, ops

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(4)
mixing = random.SystemRandom()  # fault
# twin: mixing = random.Random(8)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 12)).astype("float32")
y = keras.utils.to_categorical((x[:, :3].sum(axis=1) > 0).astype("int32"), 2)

with strategy.scope():
    model = keras.Sequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=None)


def train_on_rows(batch, amount):
    inputs, classes = batch

    def loss():
        mixed = amount * inputs + (1 - amount) * ops.flip(inputs, axis=1)
        wanted = amount * classes + (1 - amount) / 2
        return loss_fn(wanted, model(mixed, training=True))

    value, gradients = un.value_and_grad(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


@un.function
def step(batch, amount):
    return strategy.reduce("SUM", strategy.run(train_on_rows, args=(batch, amount)), axis=None)


for batch in strategy.distribute_dataset((x, y), batch_size=24):
    amount = np.float32(mixing.betavariate(0.4, 0.4))
    step(batch, amount)
