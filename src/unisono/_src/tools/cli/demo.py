"""`unisono demo`: one training on two placements, whose bits are compared."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import keras
import tyro

import unisono as un
from unisono._src.engine.xla import runtime
from unisono._src.tools.cli import datasets
from unisono._src.tools.cli.output import CommandError, check_counts
from unisono._src.typing import Logs, Shape


class EpochTimes(keras.callbacks.Callback):
    """Times each epoch of a `fit`, with its validation and without.

    The first epoch compiles every program, those of a smaller last batch and of the validation too. So what it takes longer than a
    later one is what compiling takes. It has no method for batches, since those would let `fit` call each step by itself.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self.epochs: list[float] = []
        self.trainings: list[float] = []

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self._steps: int = params["steps"]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began = self._clock()
        self._trained: float | None = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._trained = self._clock()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        ended = self._clock()
        self.epochs.append(ended - self._began)
        self.trainings.append((ended if self._trained is None else self._trained) - self._began)

    @property
    def compiling(self) -> float | None:
        """Seconds that compiling took; None for a single epoch. The first epoch took so much longer than a later one."""
        return max(0.0, self.epochs[0] - statistics.median(self.epochs[1:])) if len(self.epochs) > 1 else None

    @property
    def step(self) -> float | None:
        """Seconds of a step in later epochs; None for a single epoch."""
        return statistics.median(self.trainings[1:]) / self._steps if len(self.epochs) > 1 else None


MOST_CPU_DEVICES = 8

WHY_THE_SECOND_COMPILES_LESS = "The first training compiles what both need. Steps are those of later epochs."

WHY_CPU_DEVICES_ARE_NO_FASTER = (
    "On CPU several devices show that the bits are the same. They are no faster: one device has the threads of all cores too, and several meet in "
    "each step to add up."
)

# Equal curves lie on top of each other: a wide pale line under a thin dark one shows both.
STYLES: tuple[dict[str, object], ...] = (
    {"linewidth": 6, "alpha": 0.3, "solid_capstyle": "round"},
    {"linewidth": 1.4, "linestyle": (0, (4, 2))},
)


@dataclasses.dataclass(frozen=True)
class DemoRun:
    """One training and its results."""

    strategy: un.Strategy
    model: keras.Model
    history: dict[str, list[float]]
    times: EpochTimes
    fingerprint: str


def demo(
    *,
    dataset: datasets.DatasetName = "digits",
    epochs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 40 for digits, else 2)")] = None,
    batch_size: int = 64,
    replicas: int = 8,
    seed: int = 0,
    out: Path = Path("out"),
) -> int:
    """Trains a small conv net on two placements, and compares the bits.

    The placements are several devices, and one device. The same model, data, seed and number of replicas give the same fingerprint on every
    placement. The learning curves and the model are written to a folder. The exit code is 1 if the fingerprints differ.

    Args:
        dataset: The images to train on. The digits come with scikit-learn; Keras downloads the others.
        epochs: Passes over the data.
        batch_size: Rows of a global batch, over all replicas.
        replicas: R, the number of logical replicas that each global batch is cut into.
        seed: The seed of the weights, the dropout and the order of rows.
        out: The folder for the learning curves and the model.
    """
    check_counts(" Leave it out to have its default.", epochs=epochs, batch_size=batch_size, replicas=replicas)
    missing = [module for module in ("sklearn", "matplotlib") if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f'the demo needs {" and ".join(missing)}. Write: pip install "unisono[demo]"')
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the training, so that no result is lost for want of a place
    except OSError as error:
        raise CommandError(f"the folder --out {out} cannot be made: {error.strerror}. Name another folder.") from error
    several, one = make_strategies(replicas)
    images = datasets.load_dataset(dataset)
    epochs = epochs or images.epochs

    print(f"{images.title}: {len(images.x_train)} to train on, {len(images.x_test)} held out.")
    print(f"R = {replicas} replicas, global batch {batch_size}, {epochs} epochs, seed {seed}.")
    runs = [train_on(strategy, images, epochs, batch_size, seed) for strategy in (several, one)]

    model_file = out / f"{dataset}.keras"
    picture = out / f"{dataset}_curves.png"
    runs[0].model.save(model_file)
    draw_curves(picture, images.title, runs)
    return print_report(runs, picture, model_file)


def make_strategies(replicas: int) -> tuple[un.Strategy, un.Strategy]:
    """Make strategies for all devices of this machine and for one.

    If JAX finds no GPU or TPU, it makes CPU devices. Their number must be set before anything starts JAX.
    """
    runtime.make_cpu_devices(count_cpu_devices(runtime.count_cores(), replicas))
    one = un.OneDeviceStrategy(replicas=replicas)
    return un.MirroredStrategy(devices=jax.devices()[:replicas], replicas=replicas), one


def count_cpu_devices(cores: int, replicas: int) -> int:
    """Count one device for each core, but at least two. More devices only share the cores; two are needed to compare bits."""
    return min(max(cores, 2), MOST_CPU_DEVICES, replicas)


def train_on(strategy: un.Strategy, images: datasets.Images, epochs: int, batch_size: int, seed: int) -> DemoRun:
    """Train the model under a strategy."""
    print(f"\n{format_placement(strategy)}")
    for device, block in zip(strategy.placement.devices, strategy.placement.blocks, strict=True):
        replicas = f"replica {block[0]}" if len(block) == 1 else f"replicas {block[0]} to {block[-1]}, one after another"
        print(f"  {device.platform}:{device.id}  {replicas}")
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = make_conv_net(images.x_train.shape[1:])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    held_out = (images.x_test, images.y_test)
    times = EpochTimes()
    history = model.fit(
        images.x_train, images.y_train, batch_size=batch_size, epochs=epochs, validation_data=held_out, callbacks=[times]
    )
    return DemoRun(strategy, model, history.history, times, un.fingerprint(model))


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
    """Print the results. The exit code is 0 if all fingerprints are equal, else 1."""
    equal = len({run.fingerprint for run in runs}) == 1
    print(f"\n{'placement':<30}  {'held-out accuracy':>17}  {'compiling':>9}  {'a step':>9}  fingerprint")
    for run in runs:
        accuracy = f"{run.history['val_accuracy'][-1]:.2%}"
        compiling = "" if run.times.compiling is None else f"{run.times.compiling:.1f} s"
        step = "" if run.times.step is None else f"{1000 * run.times.step:.2f} ms"
        print(f"{format_placement(run.strategy):<30}  {accuracy:>17}  {compiling:>9}  {step:>9}  {run.fingerprint}")
    if equal:
        print("\nThe fingerprints are equal: weights, optimizer and random state have the same bits on both placements.")
    else:
        print("\nThe fingerprints DIFFER: the two placements have not trained the same bits. This is a bug; please report it.")
    if runs[0].times.step is not None:
        print(WHY_THE_SECOND_COMPILES_LESS)
    if jax.default_backend() == "cpu" and max(len(run.strategy.devices) for run in runs) > 1:
        print(WHY_CPU_DEVICES_ARE_NO_FASTER)
    print(f"\nlearning curves  {picture}\nmodel            {model_file}")
    return 0 if equal else 1


def draw_curves(file: Path, title: str, runs: list[DemoRun]) -> None:
    """Draw loss and accuracy over the epochs of each run. The picture is a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # a picture, and no window, on machines with and without a screen
    figure.suptitle(title)
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for style, run in zip(STYLES, runs, strict=True):
            for prefix, rows, colour in (("", "training", "#1f77b4"), ("val_", "held out", "#d95f02")):
                values = run.history[prefix + quantity]
                label = f"{rows}: {format_placement(run.strategy)}"
                axes.plot(range(1, len(values) + 1), values, color=colour, label=label, **style)
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        if quantity == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        else:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def format_placement(strategy: un.Strategy) -> str:
    devices = count_in_words(len(strategy.devices), f"{strategy.devices[0].platform.upper()} device")
    return f"{devices}, {count_in_words(strategy.num_replicas_in_sync, 'replica')}"


def count_in_words(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
