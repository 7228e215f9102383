"""`unisono demo`: one training on two placements, and whether a bit differs."""

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
from unisono._src.xla import runtime

MOST_CPU_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training came to."""

    strategy: un.Strategy
    model: keras.Model
    history: dict[str, list[float]]
    seconds: float
    fingerprint: str


def demo(
    *,
    dataset: datasets.Name = "digits",
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
    folder = made_folder(out)
    several, one = strategies(replicas)
    images = datasets.load(dataset)
    epochs = epochs or images.epochs

    print(f"{images.title}: {len(images.x_train)} to train on, {len(images.x_test)} held out.")
    print(f"R = {replicas} replicas, global batch {batch_size}, {epochs} epochs, seed {seed}.")
    runs = [train(strategy, images, epochs, batch_size, seed) for strategy in (several, one)]

    model_file, picture = folder / f"{dataset}.keras", folder / f"{dataset}_curves.png"
    runs[0].model.save(model_file)
    curves.write(picture, images.title, {placement_in_words(run.strategy): run.history for run in runs})
    return report(runs, picture, model_file)


def strategies(replicas: int) -> tuple[un.Strategy, un.Strategy]:
    """One strategy for all devices of this machine and one for a single device. Where JAX finds no GPU or TPU, CPU devices
    are made, which must be settled before anything starts JAX."""
    jax.config.update("jax_num_cpu_devices", min(MOST_CPU_DEVICES, replicas))
    one = un.OneDeviceStrategy(replicas=replicas)
    return un.MirroredStrategy(devices=jax.devices()[:replicas], replicas=replicas), one


def train(strategy: un.Strategy, images: datasets.Images, epochs: int, batch_size: int, seed: int) -> Run:
    print(f"\n{placement_in_words(strategy)}")
    for device, block in zip(strategy.placement.devices, strategy.placement.blocks, strict=True):
        print(f"  {device.platform}:{device.id}  {replicas_in_words(block)}")
    started = time.perf_counter()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = conv_net(images.x_train.shape[1:])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    held_out = (images.x_test, images.y_test)
    history = model.fit(images.x_train, images.y_train, batch_size=batch_size, epochs=epochs, validation_data=held_out)
    return Run(strategy, model, history.history, time.perf_counter() - started, un.fingerprint(model))


def conv_net(shape: tuple[int, ...]) -> keras.Model:
    layers = keras.layers
    return keras.Sequential([
        keras.Input(shape),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ])  # fmt: skip


def report(runs: list[Run], picture: Path, model_file: Path) -> int:
    """Prints what came out; 0 where all fingerprints are equal, 1 where not."""
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
    if jax.default_backend() == "cpu" and count > runtime.cores():
        print(
            f"{count} CPU devices share {counted(runtime.cores(), 'core')} here, so that they do the same work as one, and hand on sums "
            f"besides: they take longer. Devices of their own, as GPUs are, compute beside one another."
        )
    print(f"\nlearning curves  {picture}\nmodel            {model_file}")
    return 0 if equal else 1


def placement_in_words(strategy: un.Strategy) -> str:
    count, kind = len(strategy.devices), strategy.devices[0].platform.upper()
    return f"{counted(count, f'{kind} device')}, {counted(strategy.num_replicas_in_sync, 'replica')}"


def replicas_in_words(block: range) -> str:
    return f"replica {block[0]}" if len(block) == 1 else f"replicas {block[0]} to {block[-1]}, one after another"


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def check_options(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise CommandError(f"--{option} must be 1 or more; received {value}. Leave it out to have its default.")


def check_extra(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f"the demo needs {' and '.join(missing)}, not installed here. Write: pip install 'unisono[demo]'")


def made_folder(out: Path) -> Path:
    """Made before the training, so that none is lost for want of a place."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the folder --out {out} cannot be made: {error.strerror}. Name another folder.") from error
    return out
