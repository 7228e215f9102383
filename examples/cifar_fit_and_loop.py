"""`fit` against a loop of one's own, three runs of one conv net: `fit`, the loop, and the loop with two lines missing.

Run it with `python examples/cifar_fit_and_loop.py`. The lines are those that distribute the datasets. Without them every replica
trains on the whole batch, in silence, in a library that does not ask; here that is an error, and has to be asked for.
With `--full`, the net and the data are those with which that was found: CIFAR-10, which Keras downloads, and a hundred epochs.
"""

import argparse
import pathlib

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--full", action="store_true", help="CIFAR-10 in place of the digits that scikit-learn brings")
parser.add_argument("--devices", type=int, default=2, help="where the 8 replicas run, which changes no fingerprint")
parser.add_argument("--picture", type=pathlib.Path, default="cifar_fit_and_loop.png")
options = parser.parse_args()

SEEDS = range(5)
if options.full:
    EPOCHS, BATCH_SIZE, CHANNELS, CONVOLUTIONS = 100, 128, (64, 128, 256), 3
else:
    EPOCHS, BATCH_SIZE, CHANNELS, CONVOLUTIONS = 12, 128, (16, 32, 64), 1


def new_strategy():
    return un.MirroredStrategy(devices=options.devices, replicas=8)


new_strategy()  # before the data and the models, because it makes two CPU devices where there is no GPU


def load():
    """((images, classes) to train on, the same to validate with); images are in [0, 1]."""
    if options.full:
        return tuple((x / np.float32(255), y.ravel()) for x, y in keras.datasets.cifar10.load_data())
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    return (x[:1300], y[:1300]), (x[1300:], y[1300:])


def augmented(images, random):
    """Each image flipped or not, and shifted by two pixels at most into a reflected border."""
    count, height, width, _ = images.shape
    flip = random.random(count) < 0.5
    images = np.where(flip[:, None, None, None], images[:, :, ::-1], images)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    rows = random.integers(5, size=(count, 1)) + np.arange(height)
    columns = random.integers(5, size=(count, 1)) + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class Batches(keras.utils.PyDataset):
    """Global batches, those for training shuffled and augmented by a generator of their own: the same ones for each run of a seed."""

    def __init__(self, rows, seed=None):
        super().__init__()
        self.images, self.classes = rows
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return -(-len(self.images) // BATCH_SIZE)

    def __getitem__(self, index):
        chosen = np.arange(len(self.images))
        if self.seed is not None:
            chosen = np.random.default_rng([self.seed, self.epoch]).permutation(chosen)
        chosen = chosen[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]
        images = self.images[chosen]
        if self.seed is not None and options.full:  # a digit in a mirror is no digit
            images = augmented(images, np.random.default_rng([self.seed, self.epoch, index]))
        return images, self.classes[chosen]

    def on_epoch_end(self):
        self.epoch += 1

    def __iter__(self):
        for index in range(len(self)):
            yield self[index]
        self.on_epoch_end()


TRAINING, VALIDATION = load()


def conv_net():
    def blocks():
        for number, channels in enumerate(CHANNELS):
            if number:
                yield layers.AveragePooling2D(2)
            for _ in range(CONVOLUTIONS):
                yield from (layers.Conv2D(channels, 3, padding="same"), layers.BatchNormalization(), layers.ReLU())

    image = keras.Input(TRAINING[0].shape[1:])
    return keras.Sequential([image, *blocks(), layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")])


def rate(epoch, _=None):
    return 0.1 if epoch < 0.6 * EPOCHS else 0.01 if epoch < 0.85 * EPOCHS else 0.001


def bits(model):
    return un.fingerprint(model.trainable_variables, model.non_trainable_variables)


def by_fit(seed):
    keras.utils.set_random_seed(seed)
    with new_strategy().scope():
        model = conv_net()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        Batches(TRAINING, seed),
        validation_data=Batches(VALIDATION),
        epochs=EPOCHS,
        shuffle=False,
        callbacks=[keras.callbacks.LearningRateScheduler(rate)],
        verbose=0,
    )
    return history.history, bits(model)


def by_loop(seed, distributed=True, replicated=False):
    keras.utils.set_random_seed(seed)
    strategy = new_strategy()
    with strategy.scope():
        model = conv_net()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of_each = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def training_step(batch):
        images, classes = batch

        def loss():
            predictions = model(images, training=True)
            losses = loss_of_each(classes, predictions)
            return (losses if VEC or distributed else ops.sum(losses) / BATCH_SIZE), predictions

        (share, predictions), gradients = un.value_and_grad(loss, model.trainable_variables, has_aux=True)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(classes, predictions)
        return share

    def validation_step(batch):
        images, classes = batch
        accuracy.update_state(classes, model(images, training=False))

    training, validation = Batches(TRAINING, seed), Batches(VALIDATION)
    if distributed:
        training, validation = strategy.distribute_dataset(training), strategy.distribute_dataset(validation)
    given = un.replicate if replicated else lambda batch: batch

    history = {"loss": [], "accuracy": [], "val_accuracy": []}
    for epoch in range(EPOCHS):
        optimizer.learning_rate = rate(epoch)
        loss = 0.0
        for batch in training:
            loss += strategy.reduce("SUM", strategy.run(training_step, args=(given(batch),)), axis=None)
        history["loss"].append(float(loss) / len(training))
        history["accuracy"].append(float(accuracy.result()))
        accuracy.reset_state()
        for batch in validation:
            strategy.run(validation_step, args=(given(batch),))
        history["val_accuracy"].append(float(accuracy.result()))
        accuracy.reset_state()
    return history, bits(model)


import os
import time

VEC = bool(os.environ.get("VEC"))
try:
    by_loop(0, distributed=False)
except ValueError as error:
    print(error)
for name, f in (("fit", by_fit), ("loop", by_loop), ("wrong", lambda s: by_loop(s, False, True))):
    t = time.time()
    hs = [f(s) for s in SEEDS]
    print(name, [h[1][:6] for h in hs], time.time() - t)
    v = np.array([h[0]["val_accuracy"] for h in hs])
    print(np.round(v.mean(0) * 100, 1), v[:, -1])
