"""Cores, devices and thread pools: one fingerprint, or a clear message."""

from __future__ import annotations

import functools
import json
import os
import random
from typing import Any

import pytest

from kept_programs import NOTHING_KEPT
from matrix_of_threads import FIRST, SENSITIVE, Place, different, nets_and_operations, table
from processes import FOR_USERS, FULL, HERE, python
from sizes import cases, slow

FAMILIES = ["conv", "attention"] if FULL else cases(["attention"], ["conv", "attention"])
ON_CORES = """
import os, runpy, sys
os.sched_setaffinity(0, map(int, sys.argv.pop(1).split(",")))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""`python -c ON_CORES 0,1 PROGRAM ARGUMENTS`: as taskset would run it, whether a machine has that or not."""


@functools.cache
def trained(devices: int = 1, cores: int | None = None, threads: int | None = None) -> tuple[dict[str, Any], str]:
    """(fingerprints of state and predictions, and histories; what was said) of a fresh process that may use some of the cores."""
    spec = {"devices": devices, "replicas": 8, "families": FAMILIES}
    cores_to_use = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    done = python(
        *("-W", "always", "-c", ON_CORES, cores_to_use, str(HERE / "train_and_print.py"), json.dumps(spec)),
        **NOTHING_KEPT,
        **FOR_USERS,
        **({} if threads is None else {"PJRT_NPROC": str(threads)}),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("devices", "cores", "threads"), slow((2, 1, None), (2, None, 16), (1, None, 3), (1, 1, None), (2, None, 2))
)
def test_cores_and_threads_change_nothing(devices, cores, threads):
    assert trained(devices, cores, threads)[0] == trained()[0]


NETS = cases(SENSITIVE[:1], (*range(6), *SENSITIVE))
OPERATIONS = cases(2, 60)
PLACES = cases(
    [Place(threads=2), Place(3, threads=3)], [FIRST, Place(3), Place(8), Place(threads=2), Place(3, threads=3), Place(threads=8)]
)


def test_nets_and_operations_have_one_fingerprint_in_fresh_processes():
    """A pool has a thread for each core, or for each CPU device where there are more of them; `make matrix` tries more nets, operations
    and places. UNISONO_SEED, which is printed where this fails, draws the same operations again."""
    seed = int(os.environ.get("UNISONO_SEED", random.randrange(10**6)))
    print(f"UNISONO_SEED={seed}")
    first, *others = (nets_and_operations(place, NETS, OPERATIONS, seed, seven=place == PLACES[0]) for place in PLACES)
    assert first.pop("seven"), "YNNPACK ends the process over its sum"
    assert len(first) == len(NETS) + OPERATIONS
    for place, other in zip(PLACES[1:], others, strict=True):
        assert different(other, first) == [], str(place)


@pytest.mark.parametrize("wrong", [{"0": "b"}, {}])
def test_the_table_tells_what_is_different(wrong):
    same = {"0": "a", "1": "c"}
    found = {FIRST: (same, same), Place(3): (same | wrong if wrong else {"0": "a"}, same)}
    assert table(found).splitlines()[2:] == ["| 1 device | 2 of 2 | 2 of 2 |", "| 3 devices | 1 of 2 | 2 of 2 |"]


CRASH = """
import unisono as un
import keras
import numpy as np
from keras import layers, ops


class Weighted(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(1, 1, 2, 2, 8, 1, 8), initializer="ones")

    def call(self, x):
        return ops.sum(x * self.scale, axis=3)


with un.OneDeviceStrategy(replicas=2).scope():
    model = keras.Sequential([layers.Input((1, 2, 2, 8, 8, 8)), Weighted(), layers.Flatten(), layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).standard_normal((12, 1, 2, 2, 8, 8, 8)).astype("float32")
print(model.fit(x, np.zeros((12, 1)), batch_size=6, verbose=0).history["loss"], model.predict(x, verbose=0).shape)
"""


@pytest.mark.slow
def test_a_sum_over_one_axis_of_seven_does_not_end_the_process():
    """YNNPACK ends it with a fault of memory; programs of ours give it no sums. (One of the nets above has such a sum too.)"""
    done = python("-c", CRASH, **NOTHING_KEPT, **FOR_USERS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "(12, 1)" in done.stdout


PREDICT = """
import keras
import numpy as np
import unisono as un

with un.OneDeviceStrategy().scope():
    model = keras.Sequential([keras.layers.Input((58, 58, 5)), keras.layers.Conv2D(1, 5, kernel_initializer="ones")])
x = np.random.default_rng(0).standard_normal((7, 58, 58, 5)).astype("float32")
print(un.fingerprint(model.predict(x, verbose=0)))
"""


@pytest.mark.slow
def test_threads_do_not_change_predictions():
    """XLA cuts this convolution by them, where it is left as it is."""
    of_two, of_four = (python("-c", PREDICT, PJRT_NPROC=threads) for threads in ("2", "4"))
    assert of_two.returncode == 0, of_two.stderr
    assert of_two.stdout == of_four.stdout
