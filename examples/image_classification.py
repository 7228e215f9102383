"""Image classification with a net of keras.applications, a grain pipeline and random flips and crops.

Run it with `python examples/image_classification.py`, after `pip install "unisono[data,demo]"`. It needs no data: the pictures are drawn
by NumPy. `--devices` changes no fingerprint.

The pipeline shuffles each pass in another order, and each picture is flipped or not, gets a reflected border of two pixels, and is
cropped somewhere. grain gives each row its own random generator, made from the seed and the row's place: the rows are the same in every
run, and a training that is interrupted goes on with the right ones.
"""

import argparse
import pathlib

import unisono as un  # before keras, so that Keras runs on JAX

# isort: split
import grain
import keras
import numpy as np
from matplotlib.figure import Figure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=2, help="how many devices run the 4 replicas; changes no fingerprint")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--pictures", type=int, default=3000, help="how many pictures to train on")
parser.add_argument("--picture", type=pathlib.Path, default="image_classification.png")
options = parser.parse_args()

strategy = un.MirroredStrategy(devices=options.devices, replicas=4)  # first: it makes the CPU devices where there is no GPU
keras.utils.set_random_seed(0)
BATCH_SIZE = 32
STEPS = options.pictures // BATCH_SIZE

# --- Pictures -----------------------------------------------------------------------------------------------------------------

SIZE = 64
CLASSES = ("disc", "ring", "square", "frame", "triangle", "cross", "stripes", "dots")


def draw_shape(name, x, y):
    """Return which pixels a shape covers; x and y are 0 in its middle, and 1 or -1 at its edge."""
    distance = np.hypot(x, y)
    reach = np.maximum(abs(x), abs(y))
    return {
        "disc": distance < 1,
        "ring": (distance < 1) & (distance > 0.6),
        "square": reach < 0.85,
        "frame": (reach < 0.85) & (reach > 0.5),
        "triangle": (y < 0.8) & (y > 2 * abs(x) - 0.9),
        "cross": (reach < 1) & (np.minimum(abs(x), abs(y)) < 0.3),
        "stripes": (reach < 1) & (np.sin(8 * y) > 0),
        "dots": (reach < 1) & (np.sin(7 * x) * np.sin(7 * y) > 0.2),
    }[name]


def draw_pictures(count, rng):
    """Return (pictures, classes): light shapes of random colour, place, size and slant on a dark background, with noise."""
    classes = rng.integers(len(CLASSES), size=count)
    pictures = np.empty((count, SIZE, SIZE, 3), "float32")
    down, right = np.mgrid[:SIZE, :SIZE]
    for picture, number in zip(pictures, classes, strict=True):
        radius = rng.uniform(0.22, 0.4) * SIZE
        x, y = ((pixels - rng.uniform(0.4, 0.6) * SIZE) / radius for pixels in (right, down))
        angle = rng.uniform(-0.4, 0.4)
        x, y = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
        back = rng.uniform(0.0, 0.4, size=3)
        front = rng.uniform(0.6, 1.0, size=3)
        picture[:] = np.where(draw_shape(CLASSES[number], x, y)[..., None], front, back)
        picture += rng.normal(scale=0.08, size=picture.shape)
    return pictures, classes


train_pictures, train_classes = draw_pictures(options.pictures, np.random.default_rng(0))
test_pictures, test_classes = draw_pictures(800, np.random.default_rng(1))

# --- Pipeline -----------------------------------------------------------------------------------------------------------------


def augment(row, rng):
    picture, number = row
    if rng.random() < 0.5:
        picture = picture[:, ::-1]
    padded = np.pad(picture, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    top, left = rng.integers(5, size=2)
    return padded[top : top + SIZE, left : left + SIZE], number


training = (
    grain.MapDataset.source(list(zip(train_pictures, train_classes, strict=True)))
    .seed(0)
    .shuffle()
    .repeat()  # behind shuffle: each pass is in another order
    .random_map(augment)
    .batch(BATCH_SIZE)
)

# --- Model --------------------------------------------------------------------------------------------------------------------

with strategy.scope():
    net = keras.applications.MobileNet((SIZE, SIZE, 3), alpha=0.25, weights=None, include_top=False, pooling="avg")
    model = keras.Sequential([keras.layers.Rescaling(2.0, offset=-1.0), net, keras.layers.Dense(len(CLASSES))])
for layer in net.layers:
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.momentum = 0.9  # from 0.99: a short training needs moving statistics that follow faster
model.compile(
    optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(4e-3, options.epochs * STEPS)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    training,
    epochs=options.epochs,
    steps_per_epoch=STEPS,
    shuffle=False,  # the pipeline does it
    validation_data=(test_pictures, test_classes),
    validation_batch_size=200,
    verbose=2,
).history
predicted = model.predict(test_pictures, batch_size=200, verbose=0).argmax(axis=1)

# --- Result -------------------------------------------------------------------------------------------------------------------


def draw_result():
    """Draw the learning curves, and pictures of the test: those that the net takes for something else come first."""
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.2))
    axes = left.subplots()
    epochs = range(1, options.epochs + 1)
    axes.plot(epochs, history["accuracy"], marker="o", label="training, with flips and crops")
    axes.plot(epochs, history["val_accuracy"], marker="o", label="test")
    axes.axhline(1 / len(CLASSES), color="grey", linestyle=":", label="guessing")
    axes.set(xlabel="epoch", ylabel="accuracy", ylim=(0, 1))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False, loc=(0.4, 0.2))
    shown = np.argsort(predicted == test_classes, kind="stable")[:4].tolist() + list(range(14))
    for place, number in zip(right.subplots(3, 6).flat, shown, strict=True):
        is_right = predicted[number] == test_classes[number]
        place.imshow(test_pictures[number].clip(0, 1))
        place.set_title(CLASSES[predicted[number]], fontsize=9, color="black" if is_right else "tab:red")
        place.axis("off")
    right.suptitle("test pictures as the net names them, errors in red", fontsize=10)
    figure.savefig(options.picture)


print(f"\n{'class':<10} {'pictures':>8} {'found':>6}")
for number, name in enumerate(CLASSES):
    is_class = test_classes == number
    print(f"{name:<10} {is_class.sum():>8} {np.mean(predicted[is_class] == number):>6.0%}")
print(f"\ntest accuracy {np.mean(predicted == test_classes):.1%}, by guessing {1 / len(CLASSES):.1%}")
print(f"fingerprint {un.fingerprint(model)}")
draw_result()
print(f"learning curves and pictures: {options.picture}")
