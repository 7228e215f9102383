"""Train on standardized columns, whose means are taken on all devices."""

import unisono as un
import jax
import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(17)

rng = np.random.default_rng(0)
x = rng.gamma(2.0, size=(1024, 7)).astype("float32")
y = np.log(x).sum(axis=1, keepdims=True)


def take_means(rows):
    mesh = jax.make_mesh((jax.device_count(),), ("parts",), axis_types=(jax.sharding.AxisType.Auto,))

    def add(part):  # fault
        return jax.lax.psum(part.sum(axis=0), "parts")  # fault

    total = jax.shard_map(add, mesh=mesh, in_specs=PartitionSpec("parts"), out_specs=PartitionSpec())(rows)  # fault
    # twin: spread = jax.device_put(rows, jax.NamedSharding(mesh, PartitionSpec("parts")))
    # twin: total = np.asarray(spread).sum(axis=0)
    return np.asarray(total) / len(rows)


means = take_means(x)
scales = np.sqrt(take_means((x - means) ** 2))
with strategy.scope():
    model = keras.Sequential([keras.Input((7,)), layers.Dense(16, "relu"), layers.Dense(1)])
model.compile("adam", "mse")
model.fit((x - means) / scales, y, batch_size=256, epochs=1, verbose=0)
