"""Train a model of words that are folded into a small table."""

import unisono as un
import keras
import numpy as np
from keras import layers

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(10)
BUCKETS = 16

WORDS = ["a", "ship", "in", "port", "is", "safe", "but", "that", "is", "not", "what", "ships", "are", "for"]
rng = np.random.default_rng(0)
texts = [[WORDS[number] for number in rng.integers(0, len(WORDS), size=5)] for _ in range(80)]
labels = np.array([["ship" in text or "ships" in text] for text in texts], "float32")


class Texts(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(20 * index, 20 * (index + 1))
        folded = [[hash(word) % BUCKETS for word in text] for text in texts[rows]]  # fault
        # twin: folded = [[sum(word.encode()) % BUCKETS for word in text] for text in texts[rows]]
        return np.array(folded, "int32"), labels[rows]


with strategy.scope():
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(BUCKETS, 6)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(Texts(), epochs=2, verbose=0)
