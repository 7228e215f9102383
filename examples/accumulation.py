"""Gradient accumulation as a placement: four ways to train on one batch, and one learning curve.

Run it with `python examples/accumulation.py`; with `--full` on MNIST, which Keras downloads, with batches of 6000.

A batch that is too large for a device is cut into parts that run one after another, and their gradients are added up before the
optimizer sees them. Here the parts are replicas, which several devices could run as well: nobody writes the adding, or asks what to
divide by.
"""

import argparse
import contextlib
import pathlib

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import jax
import keras
import numpy as np
from keras import layers
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--full", action="store_true", help="MNIST in place of the digits that scikit-learn brings, and ten runs")
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 6 replicas that one device accumulates")
parser.add_argument("--picture", type=pathlib.Path, default="accumulation.png")
options = parser.parse_args()

RUNS, BATCH_SIZE, EPOCHS, RATE = (10, 6000, 100, 1e-4) if options.full else (3, 288, 60, 1e-3)

several = un.MirroredStrategy(
    devices=options.devices, replicas=6
)  # first, because it makes the CPU devices where there is no GPU
at_once = un.OneDeviceStrategy(accumulate=1)
in_six_parts = un.OneDeviceStrategy(accumulate=6)


def load():
    """Images in [0, 1] and their classes."""
    if options.full:
        (x, y), _ = keras.datasets.mnist.load_data()
        return x / np.float32(255), y
    x, y = load_digits(return_X_y=True)
    return x[:1728].astype("float32") / 16, y[:1728]


IMAGES, CLASSES = load()


class OwnStep(keras.Sequential):
    """With a training step as Keras documents it for JAX: a pure function, which knows of no strategy."""

    def loss_and_state(self, weights, others, x, y):
        predictions, others = self.stateless_call(weights, others, x, training=True)
        return self.compute_loss(x, y, predictions), others

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data
        (loss, others), gradients = jax.value_and_grad(self.loss_and_state, has_aux=True)(weights, others, x, y)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        (tracker,) = self.metrics
        metrics = tracker.stateless_update_state(metrics, loss)
        return {"loss": tracker.stateless_result(metrics)}, (weights, others, slots, metrics)


def train(seed, strategy=None, kind=keras.Sequential):
    """(the loss of each epoch, the fingerprint)"""
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind([
            keras.Input(IMAGES.shape[1:]),
            layers.Flatten(),
            layers.Dense(128, activation="sigmoid"),
            layers.Dense(10, activation="softmax"),
        ])  # fmt: skip
    model.compile(keras.optimizers.Adam(RATE), "sparse_categorical_crossentropy")
    # Plain Keras and strategies shuffle by different rules; in one order, all four see the same batches.
    history = model.fit(IMAGES, CLASSES, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    return history.history["loss"], un.fingerprint(model)


def draw(curves):
    """Each curve is drawn on those before it, thinner: all are seen where they are equal."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (name, values), width, colour in zip(
        curves.items(), (13, 8.5, 4.5, 1.2), ("#c6dbef", "#6baed6", "#fdae6b", "black"), strict=True
    ):
        axes.plot(range(1, EPOCHS + 1), values.mean(axis=0), linewidth=width, color=colour, label=name, solid_capstyle="butt")
    axes.set(
        xlabel="epoch", ylabel=f"loss, mean of {RUNS} runs", title=f"Batches of {BATCH_SIZE} rows, four ways to train on them"
    )
    axes.legend(frameon=False, labelspacing=0.8)
    figure.savefig(options.picture)


curves, fingerprints = {}, {}
for name, how in {
    "plain fit": {},
    "own train_step, accumulation 6": {"strategy": in_six_parts, "kind": OwnStep},
    "accumulation 1": {"strategy": at_once},
    "accumulation 6": {"strategy": in_six_parts},
}.items():
    losses, fingerprints[name] = zip(*(train(seed, **how) for seed in range(RUNS)), strict=True)
    curves[name] = np.array(losses)
    print(f"{name:<30}  final loss {curves[name][:, -1].mean():.6f}, mean of {RUNS} runs")

difference = np.ptp([values[:, -1] for values in curves.values()], axis=0).max()
print(f"largest difference between the final losses of a run: {difference:.1e}")

print(f"\naccumulation 6 on one device, and 6 replicas on {len(several.devices)}:")
for seed, one in enumerate(fingerprints["accumulation 6"]):
    _, other = train(seed, several)
    print(f"  run {seed}  {one}  {other}  {'the same bits' if one == other else 'DIFFERENT'}")

draw(curves)
print(f"\nlearning curves: {options.picture}")
