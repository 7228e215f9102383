"""The picture of the first page: one training on five placements, their learning curves, and their fingerprints.

    python docs/placements.py

trains each placement in a process of its own, the last one in two processes by `unisono launch`, and writes docs/placements.svg.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

PICTURE = pathlib.Path(__file__).with_name("placements.svg")

LAUNCH = ["-m", "unisono", "launch", "--processes", "2", "--devices-per-process", "2", "--cpu"]
PLACEMENTS = {
    "eight replicas one after another on one device": ([], "OneDeviceStrategy(replicas=8)"),
    "on two devices": ([], "MirroredStrategy(devices=2, replicas=8)"),
    "on three devices": ([], "MirroredStrategy(devices=3, replicas=8)"),
    "on eight devices": ([], "MirroredStrategy(devices=8, replicas=8)"),
    "in two processes of two devices": (LAUNCH, "MultiWorkerMirroredStrategy(replicas=8)"),
}
"""How each is started, and its strategy."""

EPOCHS = 12


def train(strategy_code: str) -> None:
    """Train, and print the validation losses and the fingerprint as JSON."""
    import unisono as un

    # isort: split
    import keras
    from keras import layers
    from sklearn.datasets import load_digits

    strategy = eval(f"un.{strategy_code}")
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
    history = model.fit(x[:1300], y[:1300], batch_size=64, epochs=EPOCHS, validation_data=(x[1300:], y[1300:]), verbose=0)
    print(json.dumps([history.history["val_loss"], un.fingerprint(model)]))


def run(options: list[str], strategy_code: str) -> tuple[list[float], str]:
    command = [sys.executable, *options, *([] if not options else ["--"]), __file__, strategy_code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    losses, fingerprint = json.loads(printed[printed.index("[[") :].splitlines()[0])
    return losses, fingerprint


def draw(results: dict[str, tuple[list[float], str]]) -> None:
    """Each curve is drawn on those before it, thinner: all are seen where they are equal."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "unisono", "font.family": "sans-serif"}
    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.subplots()
    colours = ("#c6dbef", "#9ecae1", "#4292c6", "#fdae6b", "#202020")
    for (name, (losses, fingerprint)), width, colour in zip(results.items(), (15, 11, 7.5, 4.2, 1.2), colours, strict=True):
        axes.plot(
            range(1, EPOCHS + 1), losses, linewidth=width, color=colour, solid_capstyle="butt", label=f"{name}\n{fingerprint}"
        )
    equal = len({fingerprint for _, fingerprint in results.values()}) == 1
    axes.set(
        xlabel="epoch",
        ylabel="validation loss",
        title=f"One training of R = 8, five placements: {'the same bits' if equal else 'OTHER BITS'}",
    )
    axes.legend(frameon=False, labelspacing=0.9, fontsize=9)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1])
    else:
        draw({name: run(*how) for name, how in PLACEMENTS.items()})
