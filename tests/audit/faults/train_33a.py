"""Train a tagger of words, in a loop, on texts of other lengths."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(33)

rng = np.random.default_rng(0)
lengths = rng.integers(1, 9, size=96)
counted = (np.arange(8) < lengths[:, None]).astype("float32")
tokens = rng.integers(1, 20, size=(96, 8)) * counted.astype("int32")
tags = (tokens % 3).astype("int32")

with strategy.scope():
    model = keras.Sequential([keras.Input((8,), dtype="int32"), layers.Embedding(20, 8), layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.5)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def train_on_rows(batch):
    words, wanted, weights = batch

    def loss():
        values = loss_fn(wanted, model(words, training=True))
        return values, weights

    value, gradients = un.value_and_grad(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


@un.function
def step(batch):
    return strategy.reduce("SUM", strategy.run(train_on_rows, args=(batch,)), axis=None)


for batch in strategy.distribute_dataset((tokens, tags, counted), batch_size=24):
    step(batch)
