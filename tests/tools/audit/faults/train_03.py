"""Train a net whose embedding starts from points on a sphere."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(3)

rng = np.random.default_rng(0)
tokens = rng.integers(0, 30, size=(80, 6))
labels = (tokens.max(axis=1) > 24).astype("float32")[:, None]


# twin: points = np.random.default_rng(11)
def sphere(shape, dtype=None):
    rows = np.random.default_rng().normal(size=shape)  # fault
    # twin: rows = points.normal(size=shape)
    return keras.ops.convert_to_tensor(rows / np.linalg.norm(rows, axis=-1, keepdims=True), dtype=dtype or "float32")


with strategy.scope():
    inputs = keras.Input((6,), dtype="int32")
    words = layers.Embedding(30, 8, embeddings_initializer=sphere, name="words")(inputs)
    pooled = layers.GlobalAveragePooling1D(name="pool")(words)
    model = keras.Model(inputs, layers.Dense(1, name="score")(pooled), name="reader")
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(tokens, labels, batch_size=20, epochs=2, verbose=0)
