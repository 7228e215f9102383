"""`unisono demo`: one training on two placements, whose bits are compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from pathlib import Path

import jax
import keras

import unisono as un
from unisono._src.cli import curves, datasets
from unisono._src.cli.errors import CommandError
from unisono._src.typing import Shape
from unisono._src.xla import runtime

MOST_CPU_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class DemoRun:
    """One training and its results."""

    strategy: un.Strategy
    model: keras.Model
    history: dict[str, list[float]]
    seconds: float
    fingerprint: str


def demo(
    *,
    dataset: datasets.DatasetName = "digits",
    epochs: int | None = None,
    batch_size: int = 64,
    replicas: int = 8,
    seed: int = 0,
    out: Path = Path("out"),
) -> int:
    """Trains a small conv net twice, on several devices and on one, and compares the bits.

    The same model, data, seed and number of replicas give the same fingerprint wherever the replicas run. The learning
    curves and the model are written to a folder. The exit code is 1 where the fingerprints differ.

    Args:
        dataset: What to train on. The digits come with scikit-learn; Keras downloads the others.
        epochs: How often to go through the data; by default 40 times for the digits and twice for the others.
        batch_size: Rows in a global batch, which all replicas share.
        replicas: R, the number of parts into which each batch is cut.
        seed: What the weights and the order of the data start from.
        out: The folder for the learning curves and the model.
    """
    check_options(epochs=epochs, batch_size=batch_size, replicas=replicas)
    check_extra("sklearn", "matplotlib")
    folder = make_folder(out)
    several, one = make_strategies(replicas)
    images = datasets.load_dataset(dataset)
    epochs = epochs or images.epochs

    print(f"{images.title}: {len(images.x_train)} to train on, {len(images.x_test)} held out.")
    print(f"R = {replicas} replicas, global batch {batch_size}, {epochs} epochs, seed {seed}.")
    runs = [train_on(strategy, images, epochs, batch_size, seed) for strategy in (several, one)]

    model_file = folder / f"{dataset}.keras"
    picture = folder / f"{dataset}_curves.png"
    runs[0].model.save(model_file)
    curves.draw_curves(picture, images.title, {placement_in_words(run.strategy): run.history for run in runs})
    return print_report(runs, picture, model_file)


def make_strategies(replicas: int) -> tuple[un.Strategy, un.Strategy]:
    """Return a strategy for all devices of this machine and a strategy for a single device. Where JAX finds no GPU or TPU, it makes CPU
    devices, whose number must be set before anything starts JAX."""
    jax.config.update("jax_num_cpu_devices", min(MOST_CPU_DEVICES, replicas))
    one = un.OneDeviceStrategy(replicas=replicas)
    return un.MirroredStrategy(devices=jax.devices()[:replicas], replicas=replicas), one


def train_on(strategy: un.Strategy, images: datasets.Images, epochs: int, batch_size: int, seed: int) -> DemoRun:
    """Train the model under a strategy."""
    print(f"\n{placement_in_words(strategy)}")
    for device, block in zip(strategy.placement.devices, strategy.placement.blocks, strict=True):
        print(f"  {device.platform}:{device.id}  {replicas_in_words(block)}")
    started = time.perf_counter()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = make_conv_net(images.x_train.shape[1:])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    held_out = (images.x_test, images.y_test)
    history = model.fit(images.x_train, images.y_train, batch_size=batch_size, epochs=epochs, validation_data=held_out)
    return DemoRun(strategy, model, history.history, time.perf_counter() - started, un.fingerprint(model))


def make_conv_net(shape: Shape) -> keras.Model:
    layers = keras.layers
    return keras.Sequential([
        keras.Input(shape),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ])  # fmt: skip


def print_report(runs: list[DemoRun], picture: Path, model_file: Path) -> int:
    """Print the results, and return the exit code: 0 where all fingerprints are equal, 1 where not."""
    equal = len({run.fingerprint for run in runs}) == 1
    print(f"\n{'placement':<30}  {'held-out accuracy':>17}  {'seconds':>7}  fingerprint")
    for run in runs:
        accuracy = f"{run.history['val_accuracy'][-1]:.2%}"
        print(f"{placement_in_words(run.strategy):<30}  {accuracy:>17}  {run.seconds:>7.1f}  {run.fingerprint}")
    if equal:
        print("\nThe fingerprints are equal: weights, optimizer and random state have the same bits on both placements.")
    else:
        print("\nThe fingerprints DIFFER: the two placements have not trained the same bits. This is a bug; please report it.")
    count = max(len(run.strategy.devices) for run in runs)
    if jax.default_backend() == "cpu" and count > runtime.count_cores():
        print(
            f"{count} CPU devices share {count_in_words(runtime.count_cores(), 'core')} here, so that they do the same work as one, and hand on sums "
            f"besides: they take longer. Devices of their own, as GPUs are, compute beside one another."
        )
    print(f"\nlearning curves  {picture}\nmodel            {model_file}")
    return 0 if equal else 1


def placement_in_words(strategy: un.Strategy) -> str:
    count = len(strategy.devices)
    kind = strategy.devices[0].platform.upper()
    return f"{count_in_words(count, f'{kind} device')}, {count_in_words(strategy.num_replicas_in_sync, 'replica')}"


def replicas_in_words(block: range) -> str:
    return f"replica {block[0]}" if len(block) == 1 else f"replicas {block[0]} to {block[-1]}, one after another"


def count_in_words(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def check_options(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise CommandError(f"--{option} must be 1 or more; received {value}. Leave it out to have its default.")


def check_extra(*modules: str) -> None:
    """Refuse to run where a module of the extra `demo` is not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f"the demo needs {' and '.join(missing)}, not installed here. Write: pip install 'unisono[demo]'")


def make_folder(out: Path) -> Path:
    """Make the folder and return it. This comes before the training, so that no result is lost for want of a place."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the folder --out {out} cannot be made: {error.strerror}. Name another folder.") from error
    return out
