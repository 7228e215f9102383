"""Counts what Python does for a step: its calls, transfers to devices, and calls of executables. No load of the machine changes a count.

python benchmarks/calls.py [--json]

Trains a small dense net with R = 8 by `fit` and by a loop of `strategy.run` and `strategy.reduce`, on one CPU device and on eight of one
process. What counts is the difference of two epochs of other lengths, so what an epoch costs once is left out. Of `fit`, so is what a call
of several steps costs: both epochs have as many, and one device takes all steps of a call by one executable. "compiled" is how many
executables were compiled after the first epoch. `--json` prints the rows as JSON, with the limits that they must keep.
"""

from __future__ import annotations

import collections
import gc
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

import unisono as un

jax.config.update("jax_num_cpu_devices", 8)  # before anything starts JAX

# isort: split
import keras
import results
from jax._src import pjit, util
from workloads import MORE, TINY

from unisono._src.keras.fit import steps_per_call

WORKLOAD = MORE[TINY]
BATCH = WORKLOAD.batch
REPLICAS = 8
LONG, SHORT = 64, 32
"""Batches of the two epochs."""

COLUMNS = "Python calls", "transfers", "executables", "compiled"
LIMITS = {
    ("fit", 1): (97, 0, 0, 0),
    ("fit", 8): (110, 0, 0, 0),
    ("loop", 1): (520, 2, 1, 0),
    ("loop", 8): (600, 2, 1, 0),
}
"""The most that a step may count, by what trains and on how many devices."""

Counts = collections.Counter[str]


def watch_executables(counts: Counts) -> None:
    """Count every compilation, and every run of an executable, from now on: those of `jax.stages.Compiled` and those of jitted functions.

    JAX runs a jitted function past Python from its second call on. Without that, each call is a miss of a cache, which JAX tells.
    """
    call = jax.stages.Compiled.__call__

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["executables"] += 1
        return call(*args, **kwargs)

    def tell_duration(event: str, *_: Any, **__: Any) -> None:
        counts["compiled"] += event == "/jax/core/compile/backend_compile_duration"

    jax.stages.Compiled.__call__ = counted
    pjit._get_fastpath_data = lambda *_: None
    jax.monitoring.register_event_duration_secs_listener(tell_duration)


@contextmanager
def watch_calls(counts: Counts) -> Iterator[None]:
    """Count the calls of Python functions in this thread, but for those of this file, and the transfers, in the block.

    The garbage collector, which calls Python functions of JAX, does not run meanwhile.
    """
    names = {"batched_device_put_start": "transfers", "jit_cpp_cache_miss": "executables"}

    def tell_event(name: str, *_: Any) -> None:
        if name in names:
            counts[names[name]] += 1

    def tell_call(frame: types.FrameType, event: str, _: Any) -> None:
        counts["Python calls"] += event == "call" and frame.f_code.co_filename != __file__

    earlier, util.test_event_listener = util.test_event_listener, tell_event
    gc.collect()
    gc.disable()
    sys.setprofile(tell_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()
        util.test_event_listener = earlier


def make_model(strategy: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return WORKLOAD.model(keras)


def prepare_fit(strategy: Any) -> Callable[[int], Any]:
    model, optimizer = make_model(strategy)
    model.compile(optimizer, WORKLOAD.loss(keras), metrics=["accuracy"])
    rows = {steps: WORKLOAD._replace(steps=steps).data() for steps in (LONG, SHORT)}
    return lambda steps: model.fit(*rows[steps], batch_size=BATCH, shuffle=False, verbose=0)


def prepare_loop(strategy: Any) -> Callable[[int], Any]:
    model, optimizer = make_model(strategy)
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            predictions = model(x, training=True)
            accuracy.update_state(y, predictions)
            return un.compute_average_loss(loss_fn(y, predictions), global_batch_size=BATCH)

        value, gradients = un.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    x, y = WORKLOAD._replace(steps=LONG).data()
    batches = [(x[first : first + BATCH], y[first : first + BATCH]) for first in range(0, len(x), BATCH)]
    datasets = {steps: strategy.distribute_dataset(batches[:steps]) for steps in (LONG, SHORT)}

    def epoch(steps: int) -> float:
        value = None
        for batch in datasets[steps]:
            value = strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
        return float(value)

    return epoch


PREPARE = {"fit": prepare_fit, "loop": prepare_loop}


def count_step(epoch: Callable[[int], Any], counts: Counts) -> dict[str, float]:
    """Return what a step counts: the difference of two epochs by that of their steps; and what was compiled after the first epoch."""
    epoch(LONG)
    counts.clear()
    epoch(SHORT)
    compiled = counts["compiled"]
    found = {}
    for steps in (LONG, SHORT):
        counts.clear()
        with watch_calls(counts):
            epoch(steps)
        found[steps] = counts.copy()
        compiled += counts["compiled"]
    each = {name: (found[LONG][name] - found[SHORT][name]) / (LONG - SHORT) for name in COLUMNS[:-1]}
    return each | {"compiled": compiled}


def main() -> None:
    counts: Counts = collections.Counter()
    watch_executables(counts)
    steps_per_call.time = types.SimpleNamespace(perf_counter=lambda: 0.0)  # calls of `fit` grow as for the quickest steps
    rows = []
    for (way, devices), limits in LIMITS.items():
        strategy = un.MirroredStrategy(devices=jax.devices("cpu")[:devices], replicas=REPLICAS)
        found = count_step(PREPARE[way](strategy), counts)
        rows.append(
            {"step of": way, "devices": devices}
            | found
            | {f"{name}, at most": limit for name, limit in zip(COLUMNS, limits, strict=True)}
        )
    if sys.argv[1:] == ["--json"]:
        print(json.dumps(rows))
    else:
        results.report_rows("calls", rows)


if __name__ == "__main__":
    main()
