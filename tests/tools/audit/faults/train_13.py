"""Train on parts that are read by several threads."""

import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(13)

rng = np.random.default_rng(0)
rows = rng.normal(size=(128, 12)).astype("float32")
targets = rows.max(axis=1, keepdims=True)
parts = [zlib.compress(np.hstack([rows[i : i + 4], targets[i : i + 4]]).tobytes()) for i in range(0, 128, 4)]


def unpack(part):
    return np.frombuffer(zlib.decompress(part), "float32").reshape(-1, 13)


def read_rows():
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(unpack, part) for part in parts]
        return np.concatenate([future.result() for future in as_completed(futures)])  # fault
        # twin: return np.concatenate([future.result() for future in futures])


table = read_rows()
with strategy.scope():
    model = keras.Sequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.Dense(1)])
model.compile("adam", "mse")
model.fit(table[:, :12], table[:, 12:], batch_size=32, epochs=1, shuffle=False, verbose=0)
