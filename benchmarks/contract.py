"""Measures the cost of the fixed order of additions: a step over two processes, and the same engine with a plain `psum`, in turns.

python benchmarks/contract.py [ROUNDS] [--workloads NAME ...]

One device each over gloo, one replica a device. Prints milliseconds a step, medians over the fits of one pair of processes; "wide MLP"
has ten million parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import results
import workloads
from jax import lax
from jax.sharding import PartitionSpec
from timing import time_in_turns

ROUNDS = 1 if results.SMALL else 5
WIDE = "wide MLP"


def wide(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    hidden = [layers.Flatten(), *(layers.Dense(2560, "relu") for _ in range(2)), layers.Dense(workloads.CLASSES, "softmax")]
    return keras.Sequential([layers.Input((28, 28)), *hidden]), keras.optimizers.SGD(1e-3)


WORKLOADS = workloads.WORKLOADS | {WIDE: workloads.Workload(64, 10, 1, workloads.floats(28, 28), wide)}


def measure_workloads(rounds: int, names: list[str]) -> None:
    """Measure in each of the two processes. Process 0 prints."""
    import unisono as un

    strategy = un.MultiWorkerMirroredStrategy(devices=1, replicas=2)

    import keras

    from unisono._src.engine.exchange.across_processes import ProcessExchange
    from unisono._src.engine.exchange.collectives import AXIS

    plain = ProcessExchange(strategy.placement)
    sharding = plain._between._by_process

    @functools.cache
    def make_plain_program(leaves: int, schedule: Any, first: bool) -> Any:
        """Return a sum by one collective of the library."""

        def run(nodes: Any, words: jax.Array) -> Any:
            totals = {name: lax.psum(sum(node[name] for node in nodes), AXIS) for name in nodes[0]}
            return totals, lax.all_gather(words[0], AXIS)

        return jax.jit(jax.shard_map(run, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=PartitionSpec(), check_vma=False))

    plain._between._make_program = make_plain_program
    exchanges: Mapping[str, Any] = {"ours": strategy.exchange, "psum": plain}
    rows = []
    for name in names:
        workload = WORKLOADS[name]
        fits = {}
        x, y = workload.data()
        for kind, exchange in exchanges.items():
            strategy.exchange = exchange
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model, optimizer = workload.model(keras)
            model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
            fits[kind] = functools.partial(model.fit, x, y, batch_size=workload.batch, verbose=0)
            fits[kind]()  # while the exchange is set: the step is made with it
        times = time_in_turns(fits, rounds, is_ready=lambda: True)  # the two processes train as many epochs
        medians = {f"{kind}, ms": 1e3 * statistics.median(seconds) / workload.steps for kind, seconds in times.items()}
        pairs = statistics.median(ours / psum for ours, psum in zip(times["ours"], times["psum"], strict=True))
        rows.append({"workload": name} | medians | {"ours / psum": pairs})
    if strategy.writes:
        print(json.dumps(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument(
        "--workloads", nargs="+", default=["W3 MLP, batch 32"] if results.SMALL else list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure_workloads(given.rounds, given.workloads)
        return
    launch = [sys.executable, "-m", "unisono", "launch", "--processes", "2", "--cpu", "--devices-per-process", "1"]
    command = [*launch, __file__, "--measure", str(given.rounds), "--workloads", *given.workloads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("[0] [{"))
    results.report_rows("contract", json.loads(line.removeprefix("[0] ")))


if __name__ == "__main__":
    main()
