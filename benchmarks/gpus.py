"""Several GPUs: whether the bits are the same on all numbers of them, and step times beside others. Ten minutes on eight GPUs.

python benchmarks/gpus.py [--cpu N] [--out FILE] [--seconds SECONDS]

Trains a small convolutional net with BatchNorm and a small transformer, R = 8, on 1, 2, 4 and 8 GPUs of one process and in as many
processes of one GPU each; then times steps beside Keras' DataParallel and DDP of torch over NCCL, on all GPUs and on one. Writes JSON,
after each part, and says whether the bits were the same. A part that fails or takes too long is kept as text; none is begun after these
seconds. `--cpu N` tries the script on N CPU devices.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
from devices import BY_DEVICES, BY_PROCESSES, Column, format_count, list_columns, measure_row
from gpu import run_bounded
from timing import EPOCHS
from workloads import CLASSES, STEPS, TINY, TOKENS, VOCABULARY, Workload, floats, sentences

REPLICAS = 8
COUNTS = (1, 2, 4, 8)
LONGEST = 120.0
"""Seconds for a process of the bits. `peers.LONGEST` is the limit of those that are timed."""
TIMED = [TINY] if results.SMALL else [TINY, "W2 CIFAR", "W4 transformer"]
PACKAGES = "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13"
DEVICES_AS = "devices"
"""The name of the line that says which devices JAX has."""


def conv_net(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    blocks = [
        layer
        for features in (16, 32)
        for layer in (layers.Conv2D(features, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D())
    ]
    top = [layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)]
    return keras.Sequential([layers.Input((24, 24, 3)), *blocks, *top]), keras.optimizers.SGD(0.1, momentum=0.9)


def small_transformer(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    words = layers.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 64)(words)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16, dropout=0.1)(h, h)
        x = x + layers.Dense(64)(layers.Dense(256, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(words, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))), keras.optimizers.Adam()


NETS = {
    "small convolutional net": Workload(64, 2 if results.SMALL else 20, 1, floats(24, 24, 3), conv_net, from_logits=True),
    "small transformer": Workload(64, 2 if results.SMALL else 20, 1, sentences, small_transformer, from_logits=True),
}


def print_bits(devices: int, is_launched: bool) -> None:
    """Print a line of JSON that names the devices, and one for each net: (name, fingerprint)."""
    import unisono as un

    if is_launched:
        strategy: Any = un.MultiWorkerMirroredStrategy(devices=1, replicas=REPLICAS)
    else:
        strategy = un.MirroredStrategy(devices=devices, replicas=REPLICAS)

    import jax
    import keras

    tell = functools.partial(print, flush=True) if strategy.writes else lambda _: None
    tell(json.dumps([DEVICES_AS, [f"{device.platform}: {device.device_kind}" for device in jax.devices()]]))
    for name, workload in NETS.items():
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = workload.model(keras)
        model.compile(optimizer, workload.loss(keras), metrics=["accuracy"])
        x, y = workload.data()
        model.fit(x, y, batch_size=workload.batch, verbose=0)
        tell(json.dumps([name, un.fingerprint(model)]))


def find_bits(count: int, is_launched: bool, cpu: bool) -> results.Row:
    """Return the fingerprints of a placement by net, and its devices; or why there are none."""
    words = ["--processes", str(count), "--devices-per-process", "1", *(["--cpu"] if cpu else [])]
    launcher = ["-m", "unisono", "launch", *words] if is_launched else []
    command = [sys.executable, *launcher, __file__, "--run", str(count), *(["--launched"] if is_launched else [])]
    lines, reason = run_bounded(command, {}, LONGEST)
    found = dict(json.loads(line.removeprefix("[0] ")) for line in lines if line.removeprefix("[0] ").startswith('["'))
    return (
        {"on": format_count(count, BY_PROCESSES if is_launched else BY_DEVICES)} | found | ({"failed": reason} if reason else {})
    )


def compare_bits(rows: list[results.Row]) -> dict[str, str]:
    """Return, for each net, whether all placements that were run have the same bits."""
    said = {}
    for name in NETS:
        prints = {row["on"]: row[name] for row in rows if name in row}
        verdict = "the same bits" if len(set(prints.values())) == 1 else "OTHER BITS" if prints else "not run"
        said[name] = f"{verdict} on {len(prints)} of {len(rows)} placements"
    return said


def list_timed_columns(workload: str, cpu: bool) -> list[tuple[str, Column]]:
    """Return the columns of `devices.py` that run on these devices."""
    return [
        (name, place_column(column, cpu))
        for name, column in list_columns(workload, dict.fromkeys((BY_DEVICES, BY_PROCESSES), REPLICAS))
        if name not in ("tf.distribute", "JAX by hand")
    ]


def place_column(column: Column, cpu: bool) -> Column:
    """Return a column on GPUs. Cores are not waited for, there: they compute little."""
    if cpu:
        return column
    contender = column.contender._replace(variables=column.contender.variables | {"OPENBLAS_NUM_THREADS": ""})
    settings = (
        column.settings if "by_torch.py" not in contender.command else lambda count: column.settings(count) | {"cuda": True}
    )
    return column._replace(contender=contender, settings=settings, launch=None if column.launch is None else ())


def describe_gpus() -> dict[str, str]:
    """Return what `nvidia-smi` says of the GPUs and of their links, or why it says nothing."""
    questions = {
        "GPUs": ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        "links": ["topo", "-m"],
    }
    said = {}
    for what, words in questions.items():
        try:
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=20, check=False)
            said[what] = (done.stdout + done.stderr).strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            said[what] = str(error)
    return said


def list_parts(counts: list[int], cpu: bool) -> list[tuple[str, str, Callable[[], results.Row]]]:
    """Return the parts, in order: to which list the row of a part goes, what the part is, and what makes its row."""
    bits = [
        ("bits", format_count(count, kind), functools.partial(find_bits, count, kind == BY_PROCESSES, cpu))
        for kind in (BY_DEVICES, BY_PROCESSES)
        for count in (counts[-1:] if results.SMALL and kind == BY_PROCESSES else counts)
    ]
    times = [
        ("times", f"{workload} on {format_count(count, kind)}", functools.partial(measure_row, workload, columns, kind, count, 1))
        for count in dict.fromkeys(counts[-1:] if results.SMALL else (counts[-1], 1))
        for workload in TIMED
        for columns in [list_timed_columns(workload, cpu)]
        for kind in (BY_DEVICES, BY_PROCESSES)
    ]
    return bits + times


def count_devices(cpu: int | None) -> int:
    """Return on how many devices to run at most."""
    if cpu:
        return cpu
    command = [sys.executable, "-c", "import jax; print(len(jax.devices('gpu')))"]
    lines, reason = run_bounded(command, {}, LONGEST)
    if reason:
        sys.exit(
            f"\nJAX finds no GPU here. Install unisono[cuda13], or try the script by --cpu 2. JAX says: {reason.splitlines()[-1]}"
        )
    return int(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("gpus.json"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print_bits(given.run, given.launched)
        return
    end = time.monotonic() + given.seconds
    os.environ |= {"JAX_PLATFORMS": "cpu"} if given.cpu else {}
    os.environ |= {EPOCHS: "3", STEPS: "20" if given.cpu else "100"}
    counts = [count for count in COUNTS if count <= count_devices(given.cpu)]
    found: dict[str, Any] = {
        "machine": results.describe_machine(*PACKAGES),
        "nvidia-smi": describe_gpus(),
        "bits": [],
        "times": [],
    }
    with tempfile.TemporaryDirectory() as programs:
        for where, what, make_row in list_parts(counts, bool(given.cpu)):
            if where == "times":  # compiled once: compiling is not what is timed
                os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
            row = make_row() if time.monotonic() < end else {"on": what, "failed": f"not begun after {given.seconds:g} s"}
            print(json.dumps(row), flush=True)
            found[where].append(row)
            found["same bits"] = compare_bits(found["bits"])
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['same bits']}. Please send {given.out}.")


if __name__ == "__main__":
    main()
