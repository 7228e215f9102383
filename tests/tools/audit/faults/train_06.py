"""Train a conv net that hides random patches of its images."""

import unisono as un
import jax
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(6)

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8, 8, 1)).astype("float32")
y = (x[:, :4].mean(axis=(1, 2, 3)) > 0).astype("int32")


class Hide(layers.Layer):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        # twin: self.seeds = keras.random.SeedGenerator(3)

    def make_masks(self, images):
        masks = np.ones(images.shape, "float32")  # fault
        corners = np.random.default_rng().integers(0, 8 - self.size, size=(len(images), 2))  # fault
        for mask, (row, column) in zip(masks, corners, strict=True):  # fault
            mask[row : row + self.size, column : column + self.size] = 0  # fault
        return masks  # fault
        # twin: corners = keras.random.randint((keras.ops.shape(images)[0], 2, 1), 0, 8 - self.size, seed=self.seeds)
        # twin: inside = (corners <= keras.ops.arange(8)) & (keras.ops.arange(8) < corners + self.size)
        # twin: hidden = inside[:, 0, :, None, None] & inside[:, 1, None, :, None]
        # twin: return 1 - keras.ops.cast(hidden, "float32")

    def call(self, images, training=False):
        if not training:
            return images
        shape = jax.ShapeDtypeStruct(images.shape, images.dtype)  # fault
        return images * jax.pure_callback(self.make_masks, shape, images)  # fault  # here
        # twin: return images * self.make_masks(images)


with strategy.scope():
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(4, 3, activation="relu", name="edges")(Hide(3, name="patch")(inputs))
    model = keras.Model(inputs, layers.Dense(2, name="out")(layers.Flatten()(hidden)), name="eye")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
