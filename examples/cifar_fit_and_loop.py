"""`fit` against a loop of one's own: the same bits. And the loop with two lines missing, which is refused.

Run it with `python examples/cifar_fit_and_loop.py`; with `--full` on CIFAR-10, which Keras downloads, for a hundred epochs.

The two lines are those that distribute the datasets. Where nobody asks for them, a loop without them runs, every replica trains on
the whole batch, and the curves are a little worse. Here it has to be asked for by `un.replicate`, as the third run does.
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
parser.add_argument("--full", action="store_true", help="CIFAR-10 and the whole net, in place of digits and a small one")
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 8 replicas; changes no fingerprint")
parser.add_argument("--seeds", type=int, default=5, help="how many trainings of each kind, two or more")
parser.add_argument("--picture", type=pathlib.Path, default="cifar_fit_and_loop.png")
options = parser.parse_args()

SEEDS = range(options.seeds)
BATCH_SIZE = 128
# A short training needs moving statistics that follow faster.
EPOCHS, CHANNELS, CONVOLUTIONS, MOMENTUM = (100, (64, 128, 256), 3, 0.99) if options.full else (10, (16, 32, 64), 1, 0.9)


def new_strategy():
    return un.MirroredStrategy(devices=options.devices, replicas=8)


new_strategy()  # before the data and the models, because it makes the CPU devices where there is no GPU


def load():
    """(images, classes) to train on and to validate with; images are in [0, 1]."""
    if options.full:
        return [(x / np.float32(255), y.ravel()) for x, y in keras.datasets.cifar10.load_data()]
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    return (x[:1280], y[:1280]), (x[1280:1792], y[1280:1792])


TRAINING, VALIDATION = load()


def augmented(images, rng):
    """Each image is flipped or not, gets a reflected border of two pixels, and is cropped somewhere."""
    count, height, width, _ = images.shape
    flipped = rng.random(count) < 0.5
    images = np.where(flipped[:, None, None, None], images[:, :, ::-1], images)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    rows = rng.integers(5, size=(count, 1)) + np.arange(height)
    columns = rng.integers(5, size=(count, 1)) + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class TrainingBatches(keras.utils.PyDataset):
    """Global batches, a function of (seed, epoch, index). The epoch is set from outside: fit also reads batches to build a model."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return -(-len(TRAINING[0]) // BATCH_SIZE)

    def __getitem__(self, index):
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(TRAINING[0]))
        images, classes = (rows[order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]] for rows in TRAINING)
        if options.full:  # a digit in a mirror is no digit
            images = augmented(images, np.random.default_rng([self.seed, self.epoch, index]))
        return images, classes


VALIDATION_BATCHES = [
    tuple(rows[start : start + BATCH_SIZE] for rows in VALIDATION) for start in range(0, len(VALIDATION[0]), BATCH_SIZE)
]


def conv_net():
    def blocks():
        for number, channels in enumerate(CHANNELS):
            if number:
                yield layers.AveragePooling2D(2)
            for _ in range(CONVOLUTIONS):
                yield layers.Conv2D(channels, 3, padding="same")
                yield layers.BatchNormalization(momentum=MOMENTUM)
                yield layers.ReLU()
        yield layers.GlobalAveragePooling2D()
        yield layers.Dense(10, activation="softmax")

    return keras.Sequential([keras.Input(TRAINING[0].shape[1:]), *blocks()])


def rate(epoch):
    return 0.1 if epoch < 0.6 * EPOCHS else 0.01 if epoch < 0.85 * EPOCHS else 0.001


def bits(model):
    return un.fingerprint(model.trainable_variables, model.non_trainable_variables)


def by_fit(seed):
    keras.utils.set_random_seed(seed)
    with new_strategy().scope():
        model = conv_net()
    model.compile(keras.optimizers.SGD(momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    batches = TrainingBatches(seed)
    history = model.fit(
        batches,
        epochs=EPOCHS,
        shuffle=False,  # the batches do it
        validation_data=VALIDATION,
        validation_batch_size=BATCH_SIZE,
        callbacks=[
            keras.callbacks.LearningRateScheduler(rate),
            keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: setattr(batches, "epoch", epoch)),
        ],
        verbose=0,
    )
    return history.history, bits(model)


def by_loop(seed, distributed=True, handed_over=lambda batch: batch):
    keras.utils.set_random_seed(seed)
    strategy = new_strategy()
    with strategy.scope():
        model = conv_net()
        optimizer = keras.optimizers.SGD(momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    crossentropy = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def training_step(batch):
        images, classes = batch

        def loss():
            predictions = model(images, training=True)
            losses = crossentropy(classes, predictions)  # one for each example: the engine divides by the global batch
            if not distributed:
                # By hand, as in loops that believe their replica has an eighth of the batch. The engine would divide by the 8 * 128
                # rows that it counts, and heal half of the mistake.
                losses = ops.sum(losses) / BATCH_SIZE
            return losses, predictions

        (share, predictions), gradients = un.value_and_grad(loss, model.trainable_variables, has_aux=True)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(classes, predictions)
        return share

    def validation_step(batch):
        images, classes = batch
        accuracy.update_state(classes, model(images, training=False))

    def taken():
        """The accuracy so far, and none from here."""
        result = float(accuracy.result())
        accuracy.reset_state()
        return result

    batches = training = TrainingBatches(seed)
    validation = VALIDATION_BATCHES
    if distributed:
        training = strategy.distribute_dataset(training)
        validation = strategy.distribute_dataset(validation)

    history = {"loss": [], "accuracy": [], "val_accuracy": []}
    for epoch in range(EPOCHS):
        batches.epoch = epoch
        optimizer.learning_rate = rate(epoch)
        total = 0.0
        for batch in training:
            total += strategy.reduce("SUM", strategy.run(training_step, args=(handed_over(batch),)), axis=None)
        history["loss"].append(float(total) / len(training))
        history["accuracy"].append(taken())
        for batch in validation:
            strategy.run(validation_step, args=(handed_over(batch),))
        history["val_accuracy"].append(taken())
    return history, bits(model)


def draw(curves):
    """Validation accuracy, mean and range over the seeds, of each run; equal curves show as a thin line on a wide pale one."""
    styles = (
        {"linewidth": 7, "alpha": 0.35, "solid_capstyle": "butt"},
        {"linewidth": 1.4, "linestyle": (0, (4, 2))},
        {"linewidth": 1.4},
    )
    epochs = range(1, EPOCHS + 1)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (name, values), colour, style in zip(curves.items(), ("tab:blue", "black", "tab:red"), styles, strict=True):
        axes.plot(epochs, values.mean(axis=0), color=colour, label=name, **style)
        axes.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="epoch", ylabel=f"validation accuracy, mean and range of {len(SEEDS)} seeds", title=verdict(curves))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(options.picture)


def verdict(curves):
    right, wrong = (curves[name][:, -1] for name in ("loop", "loop, not distributed"))
    gap = 100 * abs(right.mean() - wrong.mean())
    spread = 100 * (right.std(ddof=1) + wrong.std(ddof=1))
    found = "A gap" if gap > spread else "No gap"
    return f"{found} between right and wrong loop on this data: {gap:.1f} points, spread {spread:.1f}"


try:
    by_loop(SEEDS[0], distributed=False)
except ValueError as error:
    print(f"A loop over a dataset that is not distributed is refused:\n  {str(error).splitlines()[0]}\n")

curves, fingerprints = {}, {}
for name, train in {
    "fit": by_fit,
    "loop": by_loop,
    "loop, not distributed": lambda seed: by_loop(seed, distributed=False, handed_over=un.replicate),
}.items():
    histories, fingerprints[name] = zip(*map(train, SEEDS), strict=True)
    curves[name] = np.array([history["val_accuracy"] for history in histories])
    for seed, fingerprint in zip(SEEDS, fingerprints[name], strict=True):
        print(f"{name:<21}  seed {seed}  validation accuracy {curves[name][seed, -1]:.1%}  {fingerprint}")

print()
for name, values in curves.items():
    print(f"{name:<21}  validation accuracy {values[:, -1].mean():.2%} +- {values[:, -1].std(ddof=1):.2%}")
print(verdict(curves))
equal = sum(a == b for a, b in zip(fingerprints["fit"], fingerprints["loop"], strict=True))
print(f"fit and loop have the same fingerprint for {equal} of {len(SEEDS)} seeds")
draw(curves)
print(f"learning curves: {options.picture}")
