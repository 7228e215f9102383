"""Two networks that train each other, in a loop of one's own: the second run of a step reads what the first one updated.

Run it with `python examples/gan.py`; with `--full` on MNIST, which Keras downloads. The drawn digits are written into a picture.
"""

import argparse
import pathlib

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import keras
import numpy as np
from keras import layers, ops
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--full", action="store_true", help="MNIST in place of the digits that scikit-learn brings")
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 4 replicas; changes no bit")
parser.add_argument("--picture", type=pathlib.Path, default="gan.png")
options = parser.parse_args()

strategy = un.MirroredStrategy(devices=options.devices, replicas=4)
keras.utils.set_random_seed(0)
EPOCHS, BATCH_SIZE, NOISE = 40 if options.full else 10, 128, 16


def load():
    """Images as rows of numbers from -1 to 1."""
    if options.full:
        x = keras.datasets.mnist.load_data()[0][0]
        return x.reshape(len(x), -1).astype("float32") / 127.5 - 1
    return load_digits(return_X_y=True)[0].astype("float32") / 8 - 1


images = load()
pixels = images.shape[1]

with strategy.scope():
    generator = keras.Sequential(
        [keras.Input((NOISE,)), layers.Dense(128, "relu"), layers.BatchNormalization(), layers.Dense(pixels, "tanh")]
    )
    discriminator = keras.Sequential(
        [keras.Input((pixels,)), layers.Dense(128, "leaky_relu"), layers.Dropout(0.3), layers.Dense(1)]
    )
    optimizers = [keras.optimizers.Adam(1e-3, beta_1=0.5) for _ in range(2)]
    seeds = keras.random.SeedGenerator(0)
    accuracy = keras.metrics.BinaryAccuracy(threshold=0)  # of the discriminator: at 50 % it cannot tell

losses = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)


def drawn(count):
    return generator(keras.random.normal((count, NOISE), seed=seeds), training=True)


def discriminate(real):
    """Real images are to be 1, drawn ones 0."""
    fake = ops.stop_gradient(drawn(len(real)))
    labels = ops.concatenate([ops.ones((len(real), 1)), ops.zeros((len(real), 1))])

    def loss():
        answers = discriminator(ops.concatenate([real, fake]), training=True)
        accuracy.update_state(labels, answers)
        return losses(labels, answers)  # one for each image: the engine divides

    value, gradients = un.value_and_grad(loss, discriminator.trainable_variables)
    optimizers[0].apply(gradients, discriminator.trainable_variables)
    return value


def generate(real):
    """As many drawn images as there were real ones are to be taken for real."""

    def loss():
        return losses(ops.ones((len(real), 1)), discriminator(drawn(len(real)), training=True))

    value, gradients = un.value_and_grad(loss, generator.trainable_variables)
    optimizers[1].apply(gradients, generator.trainable_variables)
    return value


@un.function
def step(batch):
    """Two runs, because the generator is judged by the discriminator that was just updated."""
    return [strategy.reduce("SUM", strategy.run(run, args=(batch,)), axis=None) for run in (discriminate, generate)]


dataset = strategy.distribute_dataset(images, batch_size=BATCH_SIZE, shuffle=True)
for epoch in range(EPOCHS):
    accuracy.reset_state()
    steps = [step(batch) for batch in dataset]  # values stay on the devices until somebody looks
    totals = np.mean(steps, axis=0)
    if epoch % 5 == 4:
        print(
            f"epoch {epoch + 1}: discriminator {totals[0]:.3f} ({float(accuracy.result()):.0%} right), generator {totals[1]:.3f}"
        )

side = int(pixels**0.5)
figure = Figure(figsize=(8, 2.1), dpi=150, layout="constrained")
shown = np.asarray(generator(np.random.default_rng(0).standard_normal((16, NOISE)).astype("float32"), training=False))
for axes, row in zip(figure.subplots(2, 8).flat, shown, strict=True):
    axes.imshow(row.reshape(side, side), cmap="gray_r", vmin=-1, vmax=1)
    axes.set_axis_off()
figure.savefig(options.picture)
print(f"picture: {options.picture}")
print(un.fingerprint(generator, discriminator))
