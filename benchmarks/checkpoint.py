"""Measures the time that a save keeps a training waiting, and how long a restore takes, beside Keras and Orbax with the same model.

python benchmarks/checkpoint.py [ROUNDS]

A model of 100 MB, trained by a loop with plain SGD. Prints milliseconds, medians over rounds: the plain synchronous saves of Keras
(save_weights) and Orbax, each when the step before has ended; how long un.Checkpoint.save takes to return when a step has just been started;
by how much the steps until then and the next one are slower with it than without; how long it takes until the checkpoint is on the disk, with
its digests; and how long each takes to read what it has written, of which ours checks every bit. Ratios are to Keras and to Orbax.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unisono as un

# isort: split
import jax
import keras
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import results

WIDTH = 2560
LAYERS = 4
ROWS = 32
"""Four layers of 2560 x 2560 float32 numbers: 105 MB."""


def time_milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def prepare_training_step() -> tuple[Any, Callable[[], Any]]:
    """Return a model and a function that takes one step with it."""
    strategy = un.OneDeviceStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
        optimizer = keras.optimizers.SGD(1e-6)
    rng = np.random.default_rng(0)
    batch = next(iter(strategy.distribute_dataset([rng.random((ROWS, WIDTH), dtype="float32")])))

    def step(x: Any) -> Any:
        value, gradients = un.value_and_grad(
            lambda: keras.ops.mean(model(x, training=True) ** 2, axis=-1), model.trainable_variables
        )
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return model, lambda: strategy.run(step, args=(batch,))


def main() -> None:
    rounds = 1 if results.SMALL else int(sys.argv[1]) if len(sys.argv) > 1 else 7
    model, step = prepare_training_step()
    done = lambda: jax.block_until_ready([v.value for v in model.variables])  # noqa: E731
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = un.Checkpoint(model=model)
        for number in range(rounds + 2):
            step(), done()
            arrays = {str(i): v.value for i, v in enumerate(model.variables)}
            keras_file, orbax_folder = f"{directory}/keras.weights.h5", f"{directory}/orbax{number}"
            durations = {
                "Keras' save_weights": time_milliseconds(lambda file=keras_file: model.save_weights(file)),
                "Orbax' save": time_milliseconds(lambda folder=orbax_folder, of=arrays: ocp.save(folder, of)),
            }
            step(), done()
            start = time.perf_counter()
            step(), step(), done()
            durations["two steps"] = 1e3 * (time.perf_counter() - start)
            start = time.perf_counter()
            step()
            durations["ours, until it returns"] = time_milliseconds(lambda: checkpoint.save(f"{directory}/ours", keep=1))
            step(), done()
            durations["ours, on two steps"] = 1e3 * (time.perf_counter() - start) - durations["two steps"]
            checkpoint.wait()
            step(), done()
            durations["ours, until it is written"] = time_milliseconds(
                lambda: (checkpoint.save(f"{directory}/ours", keep=1), checkpoint.wait())
            )
            durations["Keras' load_weights"] = time_milliseconds(lambda file=keras_file: model.load_weights(file))
            durations["Orbax' load"] = time_milliseconds(lambda folder=orbax_folder, of=arrays: ocp.load(folder, of))
            newest = f"{directory}/ours_{2 * number + 2}"
            durations["ours, restored"] = time_milliseconds(lambda path=newest: checkpoint.restore(path))
            if number > 1:  # the first ones compile
                for name, value in durations.items():
                    times.setdefault(name, []).append(value)
        written = sum(file.stat().st_size for file in Path(newest).rglob("*") if file.is_file())
    medians = {name: statistics.median(values) for name, values in times.items()}
    size = sum(v.value.nbytes for v in model.variables)
    print(f"a model of {size / 1e6:.2f} MB, and a checkpoint of {written / 1e6:.2f} MB")
    results.report_rows("checkpoint", [make_row(name, medians) for name in medians])


def make_row(name: str, medians: dict[str, float]) -> results.Row:
    """Return the row of the table, with the ratios to what Keras and Orbax take for the same."""
    others = (
        ("Keras' load_weights", "Orbax' load") if "load" in name or "restored" in name else ("Keras' save_weights", "Orbax' save")
    )
    ratios = {f"to {other.split()[0].rstrip(chr(39))}": medians[name] / medians[other] for other in others}
    return {"": name, "ms": medians[name]} | ratios


if __name__ == "__main__":
    main()
