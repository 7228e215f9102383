"""Train a conv net that hides random patches of its images."""

import unisono as un

# isort: split
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
    """Set a patch of each image to zero."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def make_masks(self, images):
        masks = np.ones(images.shape, "float32")
        corners = np.random.default_rng().integers(0, 8 - self.size, size=(len(images), 2))  # here
        for mask, (row, column) in zip(masks, corners, strict=True):
            mask[row : row + self.size, column : column + self.size] = 0
        return masks

    def call(self, images, training=False):
        if not training:
            return images
        shape = jax.ShapeDtypeStruct(images.shape, images.dtype)
        return images * jax.pure_callback(self.make_masks, shape, images)


with strategy.scope():
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(4, 3, activation="relu", name="edges")(Hide(3, name="patch")(inputs))
    model = keras.Model(inputs, layers.Dense(2, name="out")(layers.Flatten()(hidden)), name="eye")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
