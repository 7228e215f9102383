"""A process that trains the net of the self-test.

It prints the fingerprints as its last line, in JSON.

python -m unisono._src.tools.doctor.trainer TASK
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Callable

import jax
import keras
import numpy as np
from keras import layers

from unisono._src.engine.xla import runtime
from unisono._src.keras.fingerprint import fingerprint
from unisono._src.keras.private.trainer_state import map_newest_values
from unisono._src.keras.strategy.base import Strategy
from unisono._src.keras.strategy.builtin import MirroredStrategy, OneDeviceStrategy
from unisono._src.keras.strategy.multi_worker import MultiWorkerMirroredStrategy
from unisono._src.tools.doctor.finding import run_check
from unisono._src.tools.doctor.installation import examine_devices
from unisono._src.typing import Json


@dataclasses.dataclass(frozen=True)
class TrainedBits:
    """The bits that a placement computed, as fingerprints."""

    placement: str
    """The placement, in words."""
    steps: list[str]
    """The fingerprint of the model after each step."""
    variables: dict[str, str]
    """The fingerprint of each variable of model and optimizer at the end, by name."""
    seconds: float

    @property
    def fingerprint(self) -> str:
        return self.steps[-1]

    def describe_parting(self, other: TrainedBits) -> str:
        """Describe where this training parts from another one. "" if the bits are equal."""
        if self.steps == other.steps:
            return ""
        step = next(number for number, pair in enumerate(zip(self.steps, other.steps, strict=True), 1) if pair[0] != pair[1])
        names = [name for name, bits in self.variables.items() if bits != other.variables.get(name)]
        return f"parts at step {step} of {len(self.steps)}, in {', '.join(names) or 'no variable that is left at the end'}"


REPLICAS = 8
BATCH = 16
STEPS = 4
CLASSES = 5
SIDE = 10


class StepFingerprints(keras.callbacks.Callback):
    """Notes the fingerprint of the model after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.steps.append(fingerprint(self.model))


def train_on(strategy: Strategy, placement: str, batch: int = BATCH) -> TrainedBits:
    """Train a small model, and take the bits. It has a convolution, batch normalization and dropout; the optimizer is Adam."""
    started = time.monotonic()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_net()
    model.compile(keras.optimizers.Adam(1e-2, name="adam"), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * batch, SIDE, SIDE, 3)).astype("float32")
    y = rng.integers(0, CLASSES, len(x)).astype("int32")
    noted = StepFingerprints()
    model.fit(x, y, batch_size=batch, verbose=0, callbacks=[noted])  # pyright: ignore[reportArgumentType]  # Keras takes numbers
    newest = map_newest_values(model)
    variables = {
        name_variable(variable): fingerprint(newest.get(id(variable), variable.value))
        for variable in [*model.variables, *model.optimizer.variables]
    }
    return TrainedBits(placement, noted.steps, variables, time.monotonic() - started)


def name_variable(variable: keras.Variable) -> str:
    """Name a variable by its path, without a seed generator's number. Keras gives each seed generator a new number."""
    return re.sub(r"^seed_generator_\d+", "seed_generator", variable.path)


def make_net() -> keras.Model:
    """Build the net. It and its layers have names, which Keras would number anew for each placement."""
    stack = [
        layers.Input((SIDE, SIDE, 3)),
        layers.Conv2D(8, 3, strides=2, name="convolution"),
        layers.BatchNormalization(name="normalization"),
        layers.ReLU(name="relu"),
        layers.Dropout(0.2, name="dropout"),
        layers.Flatten(name="flat"),
        layers.Dense(CLASSES, name="classes"),
    ]
    return keras.Sequential(stack, name="net")


COUNTS = (1, 2, 4, 8)
"""Numbers of devices that are tried. Numbers that the machine has not are left out."""


def train_on_counts() -> dict[str, Json]:
    """Train on 1, 2, 4 and 8 devices of this process.

    The record has the bits of each training, and findings about the devices.
    """
    runtime.make_cpu_devices(COUNTS[-1])
    one = OneDeviceStrategy(replicas=REPLICAS)  # JAX starts here, with Unisono's settings
    available = len(jax.local_devices())
    trained = [train_on(one, describe_devices(1))]
    for count in COUNTS[1:]:
        if count <= available:
            trained.append(train_on(MirroredStrategy(devices=count, replicas=REPLICAS), describe_devices(count)))
    findings = run_check("devices", "JAX", examine_devices)
    return report_trainings(trained) | {"findings": [finding.to_json() for finding in findings]}


def train_in_new_process() -> dict[str, Json]:
    """Train on the only device of this process. The process makes no other device, and compiles for itself."""
    strategy = OneDeviceStrategy(replicas=REPLICAS)
    return report_trainings([train_on(strategy, f"{describe_devices(1)}, compiled in another process")])


def train_in_cluster() -> dict[str, Json]:
    """Train over the environment's processes, on one device of each."""
    strategy = MultiWorkerMirroredStrategy(devices=1, replicas=REPLICAS)
    processes = strategy.cluster.processes
    trained = [train_on(strategy, f"{processes} processes, {describe_devices(1)} each")]
    return report_trainings(trained if strategy.writes else [])


TASKS: dict[str, Callable[[], dict[str, Json]]] = {
    "counts": train_on_counts,
    "new-process": train_in_new_process,
    "cluster": train_in_cluster,
}


def describe_devices(count: int) -> str:
    return f"{count} {jax.default_backend().upper()} device{'s' * (count != 1)}"


def report_trainings(trained: list[TrainedBits]) -> dict[str, Json]:
    return {"trained": [dataclasses.asdict(bits) for bits in trained]}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(TASKS[sys.argv[1]]()), flush=True)
