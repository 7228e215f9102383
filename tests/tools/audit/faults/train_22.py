"""Train with smoothed labels, in a loop."""

import os

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MultiWorkerMirroredStrategy(replicas=4)
keras.utils.set_random_seed(22)
amounts = np.random.default_rng(os.getpid())  # fault
# twin: amounts = np.random.default_rng(22)

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 12)).astype("float32")
y = keras.utils.to_categorical(x[:, :3].argmax(axis=1), 3)

with strategy.scope():
    model = keras.Sequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=None)


def train_on_rows(batch, amount):
    inputs, classes = batch

    def loss():
        return loss_fn(classes * (1 - amount) + amount / 3, model(inputs, training=True))

    value, gradients = un.value_and_grad(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


@un.function
def step(batch, amount):
    return strategy.reduce("SUM", strategy.run(train_on_rows, args=(batch, amount)), axis=None)


for batch in strategy.distribute_dataset((x, y), batch_size=24):
    step(batch, np.float32(amounts.uniform(0, 0.2)))
print(f"{os.getpid()} has trained")
