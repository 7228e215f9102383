"""The memory of a step is cleared in large pages, by far fewer page faults."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from processes import python
from unisono._src.native.library import load_kernels
from unisono._src.native.step_memory import open_step

PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")

CODE = """
import resource
import keras, numpy as np
import unisono as un

keras.utils.set_random_seed(0)
with un.MirroredStrategy().scope():
    layers = [keras.layers.Dense(1024, "relu") for _ in range(6)]
    model = keras.Sequential([keras.layers.Input((256,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=False)
x, y = np.ones((4096, 256), "float32"), np.ones((4096, 1), "float32")

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.fit(x, y, batch_size=4096, verbose=0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min([count_faults() for _ in range(6)][2:]))
"""


@pytest.mark.processes
@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
@pytest.mark.skipif(
    not PAGES.exists() or "[madvise]" not in PAGES.read_text(),
    reason="this system does not give large pages to programs that ask",
)
def test_a_step_of_much_memory_has_few_page_faults():
    counts = []
    for native in ("1", "0"):
        done = python("-c", CODE, UNISONO_NATIVE=native)
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append(int(done.stdout))
    assert counts[1] > 10_000, "the memory of this step is not asked for anew: the test needs a larger one"
    assert counts[0] < counts[1] / 4


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_numbers_are_returned(platform):
    numbers = np.arange(9, dtype="int32")
    np.testing.assert_array_equal(open_step(numbers, platform), numbers)
