"""Times a step of fit on a GPU, beside plain Keras on JAX, under flags of XLA: what the same bits cost, and why.

python benchmarks/gpu.py [SECONDS]

Each contender runs in a process of its own, one after another, for at most this number of seconds: it tells the milliseconds of a step of
each workload as soon as it has them, and the fingerprint of what it has trained. A contender that runs twice shows whether XLA chooses
other kernels in another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import results
from workloads import MORE, WORKLOADS, Workload

STEPS = 2 if results.SMALL else 100
EPOCHS = 1 if results.SMALL else 4
SMALLEST = {"W3 MLP, batch 32": (32,)}
BATCHES = SMALLEST | {"W4 transformer": (32, 256), "W2 CIFAR": (128, 1024), "W6 ResNet-50": (256,), "W5 LSTM": (64,)}
"""The global batches of each workload."""

NO_GRAPHS = "--xla_gpu_enable_command_buffer="


class Contender(NamedTuple):
    """What trains, and how."""

    flags: str = ""
    strategy: dict[str, Any] | None = None
    """The arguments of the strategy; None stands for plain Keras."""
    steps_per_execution: int = 1
    """As `compile` takes it; Unisono chooses by itself where it is 1."""


CONTENDERS = {
    "ours": Contender("", {"devices": 1}),
    "ours, again": Contender("", {"devices": 1}),
    "Keras": Contender(),
    "Keras, 10 steps per execution": Contender(steps_per_execution=10),
    "ours, measured kernels": Contender("", {"devices": 1, "deterministic": False}),
    "ours, no CUDA graphs": Contender(NO_GRAPHS, {"devices": 1}),
    "ours, R = 8": Contender("", {"devices": 1, "replicas": 8}),
}


def time_workloads(contender: Contender) -> None:
    """Print a line of JSON for each workload: (name, batch, milliseconds a step, seconds of the first epoch, fingerprint)."""
    import unisono as un

    # isort: split
    import keras

    strategy = None if contender.strategy is None else un.MirroredStrategy(**contender.strategy)
    for name, batches in (SMALLEST if results.SMALL else BATCHES).items():
        for batch in batches:
            workload = (WORKLOADS | MORE)[name]._replace(batch=batch, steps=STEPS)
            keras.utils.set_random_seed(0)
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                model, optimizer = workload.model(keras)
            model.compile(
                optimizer, workload.loss(keras), metrics=["accuracy"], steps_per_execution=contender.steps_per_execution
            )
            first, *seconds = time_epochs(model, workload)
            milliseconds = 1e3 * statistics.median(seconds) / STEPS
            print(json.dumps([name, batch, milliseconds, first, un.fingerprint(model)]), flush=True)


def time_epochs(model: Any, workload: Workload) -> list[float]:
    """Return the seconds of each epoch; the first compiles."""
    x, y = workload.data()
    seconds = []
    for _ in range(EPOCHS + 1):
        start = time.perf_counter()
        model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)
        seconds.append(time.perf_counter() - start)
    return seconds


def run_contender(name: str, limit: float) -> list[results.Row]:
    """Return a row for each workload that the contender finished within the limit."""
    lines, _ = run_bounded([sys.executable, __file__, "--run", name], {"XLA_FLAGS": CONTENDERS[name].flags}, limit)
    columns = "workload", "batch", "ms a step", "first epoch, s", "fingerprint"
    return [{"contender": name} | dict(zip(columns, json.loads(line), strict=True)) for line in lines if line[:1] == "["]


def run_bounded(command: Sequence[str], variables: Mapping[str, str], limit: float) -> tuple[list[str], str]:
    """Return the lines that a process has printed within some seconds, and why it failed: nothing where it did not."""
    environment = os.environ | {"KERAS_BACKEND": "jax"} | variables
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                out, _ = process.communicate(timeout=limit)
                reason = f"exit code {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
                reason = f"longer than {limit:g} s"
        errors.seek(0)
        said = errors.read().strip()
    sys.stderr.write(said)
    return out.splitlines(), f"{reason}: {said[-2000:]}" if reason else ""


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        time_workloads(CONTENDERS[sys.argv[2]])
        return
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    rows = [row for name in CONTENDERS for row in run_contender(name, limit)]
    results.report_rows("gpu", rows)


if __name__ == "__main__":
    main()
