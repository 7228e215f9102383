"""What `strategy.memory` predicts, against what is measured on CPU: the nets of the benchmarks, one like BERT and one like GPT.

python benchmarks/predicted_memory.py [NET ...]

Prints megabytes for several R, each in a fresh process. "Held" are the arrays between two steps: those of JAX, counted in a callback. "In a
step" is what the process has more at most while it trains, beside what it held before, and with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import results
from workloads import VOCABULARY, WORKLOADS, Workload, placed

MB = 1e6
STEPS = 3
DEPTH, WIDTH, HEADS, TOKENS = (1, 64, 2, 16) if results.SMALL else (6, 512, 8, 128)


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, VOCABULARY, (count, TOKENS)).astype("int32")


def language_model(keras: Any, causal: bool) -> tuple[Any, Any]:
    """Return a net that tells a word for each place: from all places, as BERT, or from those before, as GPT."""
    layers = keras.layers
    tokens = layers.Input((TOKENS,), dtype="int32")
    x = layers.LayerNormalization()(placed(keras)(layers.Embedding(VOCABULARY, WIDTH)(tokens)))
    for _ in range(DEPTH):
        normal = layers.LayerNormalization()(x) if causal else x
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)(normal, normal, use_causal_mask=causal)
        x = x if causal else layers.LayerNormalization()(x)
        wide = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x) if causal else x)
        x = x + layers.Dropout(0.1)(layers.Dense(WIDTH)(wide))
        x = x if causal else layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x)), keras.optimizers.AdamW(1e-4)


def language(causal: bool) -> Workload:
    return Workload(8, STEPS, 1, words, lambda keras: language_model(keras, causal), from_logits=True)


NETS = {
    "W1 MNIST": (WORKLOADS["W1 MNIST, two convolutions"]._replace(batch=1024), (1, 2, 4)),
    "W2 CIFAR": (WORKLOADS["W2 CIFAR"], (1, 4, 16)),
    "W4 transformer": (WORKLOADS["W4 transformer"], (1, 4, 8)),
    "like BERT": (language(causal=False), (1, 2, 8)),
    "like GPT": (language(causal=True), (1, 2, 8)),
}


def read_status(field: str) -> float:
    """Return a field of the status of this process, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / MB


def count_live() -> float:
    import jax

    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum({each.data.unsafe_buffer_pointer(): each.data.nbytes for each in shards}.values()) / MB


def measure(net: str, replicas: int) -> results.Row:
    """Return what is predicted and what is measured, in MB."""
    import unisono as un

    strategy = un.OneDeviceStrategy(replicas=replicas)
    import keras

    workload, _ = NETS[net]
    with strategy.scope():
        model, optimizer = workload.model(keras)
    model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
    (predicted,) = strategy.memory(model, workload.batch, replicas=[replicas]).own.devices.values()
    rng = np.random.default_rng(0)
    x = workload.rows(rng, STEPS * workload.batch)
    y = words(rng, len(x)) if net.startswith("like") else rng.integers(0, 10, len(x)).astype("int32")
    held: list[float] = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            held.append(count_live())

    def fit(*callbacks: Any) -> float:
        """Return what the process has more at most."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what compiling has left behind
        before = read_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest is counted anew
        model.fit(x, y, batch_size=workload.batch, verbose=0, callbacks=list(callbacks))
        return read_status("VmHWM") - before

    fit(Count())
    for _ in range(4):  # each thread gets the memory of its kernels, which it keeps
        fit()
    in_step = count_live() + statistics.median(fit() for _ in range(3))
    return {
        "net": net,
        "R": replicas,
        "held, predicted": predicted.held / MB,
        "held, measured": max(held),
        "in a step, predicted": predicted.total / MB,
        "in a step, measured": in_step,
        "too much, %": 100 * (predicted.total / MB / in_step - 1),
    }


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    rows: list[results.Row] = []
    for net in sys.argv[1:] or NETS:
        for replicas in NETS[net][1]:
            command = [sys.executable, __file__, "--measure", net, str(replicas)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"KERAS_BACKEND": "jax"}, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    results.report_rows("predicted memory", rows)


if __name__ == "__main__":
    main()
