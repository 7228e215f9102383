"""A process that trains the net of the self-test.

It prints the fingerprints as its last line, in JSON.

python -m unisono._src.tools.doctor.trainer TASK
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable

import jax

from unisono._src.engine.xla import runtime
from unisono._src.keras.strategy.builtin import MirroredStrategy, OneDeviceStrategy
from unisono._src.keras.strategy.multi_worker import MultiWorkerMirroredStrategy
from unisono._src.tools.doctor.devices import examine_devices
from unisono._src.tools.doctor.finding import run_check
from unisono._src.tools.doctor.self_test import REPLICAS, train_on
from unisono._src.tools.doctor.trained_bits import TrainedBits
from unisono._src.typing import Json

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
