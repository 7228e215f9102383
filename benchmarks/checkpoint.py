"""Measures the time that a save keeps a training waiting, beside plain synchronous saves of the same model.

python benchmarks/checkpoint.py [ROUNDS]

A model of 100 MB, trained by a loop with plain SGD. Prints milliseconds, medians over rounds: Keras' save_weights and Orbax' save, each
when the step before has ended; how long un.Checkpoint.save takes to return when a step has just been started; and by how much the
steps until then and the next one are slower with it than without. Ratios are to the faster of the plain saves, and to Orbax', which
writes the same files.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
            weights = {str(i): v.value for i, v in enumerate(model.variables)}
            durations = {
                "Keras' save_weights": time_milliseconds(lambda: model.save_weights(f"{directory}/k.weights.h5")),
                "Orbax' save": time_milliseconds(lambda n=number, w=weights: ocp.save(f"{directory}/orbax{n}", w)),
            }
            del weights
            step(), done()
            start = time.perf_counter()
            step(), step(), done()
            without = 1e3 * (time.perf_counter() - start)
            start = time.perf_counter()
            step()
            durations["ours, until it returns"] = time_milliseconds(lambda: checkpoint.save(f"{directory}/ours", keep=1))
            step(), done()
            durations["ours, on two steps"] = 1e3 * (time.perf_counter() - start) - without
            durations["two steps"] = without
            durations["ours, until it is written"] = time_milliseconds(checkpoint.wait)
            if number > 1:  # the first ones compile
                for name, value in durations.items():
                    times.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"a model of {sum(v.value.nbytes for v in model.variables) / 1e6:.0f} MB")
    plain = "Keras' save_weights", "Orbax' save"
    rows = [{"": name, "ms": value} | {f"to {base}": value / medians[base] for base in plain} for name, value in medians.items()]
    results.report_rows("checkpoint", rows)


if __name__ == "__main__":
    main()
