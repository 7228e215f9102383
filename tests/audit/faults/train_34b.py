"""Train on a pipeline for each replica."""

import unisono as un

# isort: split
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(34)
GLOBAL_BATCH = 24

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = x[:, :1] - x[:, 1:2]


def make_pipeline(context):
    """Return the batches of one replica."""
    size = context.get_per_replica_batch_size(GLOBAL_BATCH)
    number = context.input_pipeline_id
    batches = []
    for first in range(0, len(x), GLOBAL_BATCH):
        begin = first + number * size
        batches.append((x[begin : begin + size], y[begin : begin + size]))
    return batches


with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(12, "relu"), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(strategy.distribute_datasets_from_function(make_pipeline), epochs=1, verbose=0)
