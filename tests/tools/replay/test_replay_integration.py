"""Whole replays by the command: of runs on many devices and in several processes, on one device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from processes import LAUNCH, environment, kept_in

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FIT = """
import sys
import keras
import numpy as np
from keras import layers, ops
import unisono as un


class Root(layers.Layer):
    def call(self, x):
        shifted = x - 0.5
        return ops.sqrt(shifted)


rng = np.random.default_rng(0)
x = rng.uniform(1, 2, size=(96, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
rate, bad = float(sys.argv[1]), int(sys.argv[2])
if bad >= 0:
    x[bad, 2] = 0.1
keras.utils.set_random_seed(0)
with un.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([layers.Input((6,)), Root(name="root"), layers.Dense(5, "relu"), layers.Dropout(0.2), layers.Dense(1)])
model.compile(keras.optimizers.Adam(rate), "mse")
backup = un.callbacks.BackupAndRestore("backup", save_freq=3, delete_checkpoint=False)
model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[backup, un.callbacks.Record("run")])
print("the end")
"""

LOOP = """
import keras
import numpy as np
from keras import layers, ops
import unisono as un

keras.utils.set_random_seed(0)
strategy = un.MirroredStrategy(devices=3, replicas=4)
with strategy.scope():
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5, "tanh", use_bias=False), layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.Adam(0.01)


def replica_step(batch):
    x, y = batch

    def loss():
        return ops.log(ops.square(model(x)[:, 0] - y))

    value, gradients = un.value_and_grad(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


@un.function(record="run")
def step(batch):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)


x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
x[37], y = 0, np.ones(64, "float32")
y[37] = 0
for batch in strategy.distribute_dataset((x, y), batch_size=16):
    step(batch)
"""

LINEAR = """
import keras
import numpy as np
from keras import layers
import unisono as un

x = np.random.default_rng(0).normal(size=(27, 3)).astype("float32")
y = np.arange(27, dtype="float32")[:, None]
with un.MirroredStrategy(devices=2, replicas=4).scope():
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1, kernel_initializer="ones", name="line")])
model.compile(keras.optimizers.SGD(0.0), "mse")
model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[un.callbacks.Record("run")])
"""


def run(folder, *words, given=None, **variables):
    """Run the command in a folder."""
    return subprocess.run(
        [*words],
        cwd=folder,
        env=environment(**kept_in(folder / "kept"), **variables),
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def replay(folder, *words, given=None):
    return run(folder, sys.executable, "-m", "unisono", "replay", *words, given=given)


def snapshot(folder):
    """Return the content of all files of the run."""
    return {str(path): path.read_bytes() for name in ("run", "backup") for path in (folder / name).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two processes of four devices, whose row 41 leads to a NaN."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(FIT)
    done = run(folder, *LAUNCH, "--processes", "2", "train.py", "0.01", "41", JAX_NUM_CPU_DEVICES="4")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_a_step_of_eight_devices_and_two_processes_has_its_bits_on_one_device(recorded):
    """From a checkpoint in the middle of the second epoch. Nothing of the run is written, though the script saves and records."""
    before = snapshot(recorded)
    assert len(before) > 4
    done = replay(recorded, "train.py", "--run", "run", "--step", "11", "--json", "-")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["equal"], report["R"], report["step"], report["replayed_from"]) == (True, 8, 11, 10)
    assert [replica["rows"] for replica in report["replicas"]] == [[2 * n, 2 * n + 2] for n in range(8)]
    assert snapshot(recorded) == before


def test_the_first_nan_is_found_with_row_layer_and_line(recorded):
    """The step is the first one whose loss is not finite; no checkpoint is left from before it."""
    shutil.copytree(recorded, found := recorded.parent / "nan", dirs_exist_ok=True)
    done = replay(found, "train.py", "--run", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    first, _, rest = done.stdout.partition("The first NaN:")
    assert "Equal: from the beginning on, step" in first
    lines = dict(line.strip().split(maxsplit=1) for line in rest.strip().splitlines())
    assert lines["row"].endswith(", row 41 of the data")
    assert lines["layer"] == "root"
    assert lines["equation"].startswith("sqrt(float32[16,6])")
    assert lines["line"] == f"{found / 'train.py'}:12    return ops.sqrt(shifted)"
    bad = [line.split() for line in first.splitlines() if " to " in line and line.endswith("nan")]
    assert [line[0] for line in bad] == [lines["replica"]]


@pytest.mark.thorough
@pytest.mark.parametrize("changed", ["0.02 41", "0.01 -1"])
def test_another_script_is_no_replay(recorded, changed):
    done = replay(recorded, "--run", "run", "--step", "6", "train.py", *changed.split())
    assert done.returncode == 1, done.stderr[-3000:]
    what = "the state before the step: adam/learning_rate." if changed.startswith("0.02") else "the rows of the global batch."
    said = " ".join(done.stdout.partition("\n\n")[0].split())
    assert said.startswith("Not equal: replayed from the beginning, step ")
    assert f" differs from the recorded run in {what} What follows is of the replay" in said
    assert said.endswith("Run `unisono audit` on the script: it finds where runs differ, and why.")


@pytest.mark.thorough
def test_a_loop_is_replayed_and_its_state_lies_open(tmp_path):
    (tmp_path / "train.py").write_text(LOOP)
    done = run(tmp_path, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr[-3000:]
    asked = "print(replicas[1], sorted(weights), len(batch[1]))\nreplicas[1].gradients['sequential/dense/kernel'].shape\n"
    done = replay(tmp_path, "--run", "run", "--step", "3", "--devices", "2", "--interactive", given=asked)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "<replica 1: rows 4 to 7, loss -inf> ['sequential/dense/kernel', 'sequential/dense_1/kernel'] 16" in done.stdout
    assert "(6, 5)" in done.stdout
    assert "Equal: from the beginning on, steps 1 to 3 have the bits of the recorded run." in done.stdout
    lines = done.stdout.partition("The first")[2]
    assert "row       5 of the global batch" in lines
    assert "return ops.log(ops.square(model(x)[:, 0] - y))" in lines


@pytest.mark.thorough
def test_losses_and_norms_are_those_of_the_rows(tmp_path):
    """The second batch has 11 rows for four replicas. A part of the loss is of the replica's rows, divided by all rows of the batch."""
    (tmp_path / "train.py").write_text(LINEAR)
    done = run(tmp_path, sys.executable, "train.py", JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr[-3000:]
    done = replay(tmp_path, "--run", "run", "--step", "2", "--json", "-", "train.py")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    x = np.random.default_rng(0).normal(size=(27, 3)).astype("float32")[16:].astype("float64")
    error = x.sum(axis=1) - np.arange(16, 27)
    ranges = [replica["rows"] for replica in report["replicas"]]
    assert [first for first, _ in ranges] + [11] == [0] + [end for _, end in ranges]
    for replica, (first, end) in zip(report["replicas"], ranges, strict=True):
        rows = slice(first, end)
        kernel = np.linalg.norm(2 * error[rows] @ x[rows]) / 11
        bias = abs(2 * error[rows].sum()) / 11
        assert replica["loss"] == pytest.approx((error[rows] ** 2).sum() / 11, rel=1e-5)
        assert replica["gradient_norms"] == pytest.approx(
            {"sequential/line/kernel": kernel, "sequential/line/bias": bias}, rel=1e-5
        )
