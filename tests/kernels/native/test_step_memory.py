"""The memory of a step is cleared in large pages, by far fewer page faults."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from processes import python
from rewritten import NEEDS_KERNELS
from unisono._src.kernels.native.library import load_in_use
from unisono._src.kernels.native.step_calls import open_step_memory

pytestmark = NEEDS_KERNELS

CODE = """
import resource
import keras, numpy as np
import unisono as un

keras.utils.set_random_seed(0)
with un.MirroredStrategy().scope():
    layers = [keras.layers.Dense(width, "relu") for width in (1024, 16, 1024, 16, 1024)]  # much memory, few products
    model = keras.Sequential([keras.layers.Input((16,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=False)
x, y = np.ones((4096, 16), "float32"), np.ones((4096, 1), "float32")

def count():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.fit(x, y, batch_size=4096, verbose=0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min([count() for _ in range(3)][1:]))
"""


# Writes 64 MiB of new memory in large pages; prints the page faults.
PROBE = """
import mmap, resource
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for place in range(0, len(memory), mmap.PAGESIZE):
    memory[place] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(code, **variables):
    done = python("-c", code, JAX_PLATFORMS="cpu", GLIBC_TUNABLES="", **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(mmap.PAGESIZE != 4096 or not hasattr(mmap, "MADV_HUGEPAGE"), reason="pages have other sizes here")
def test_a_step_of_much_memory_has_few_page_faults():
    if count_faults(PROBE) > 1000:
        pytest.skip("this system has no large pages to give")
    native, plain = (count_faults(CODE, UNISONO_NATIVE=switch) for switch in "10")
    assert plain > 10_000, "the memory of this step is not asked for anew: the test needs a larger one"
    assert native < plain / 4


def list_large_mappings(path):
    library = load_in_use()
    library.unisono_list_large_mappings.restype = ctypes.c_int64
    bounds = (ctypes.c_uint64 * 20)()
    count = library.unisono_list_large_mappings(str(path).encode(), bounds, ctypes.c_int64(10))
    return [(bounds[2 * number], bounds[2 * number + 1]) for number in range(count)]


def test_only_large_memory_without_a_name_gets_large_pages(tmp_path):
    path = tmp_path / "maps"
    path.write_text(
        "\n".join(
            [
                "55d000000000-55d010000000 rw-p 00000000 00:00 0                          [heap]",
                "7f1000000000-7f1004000000 rw-p 00000000 00:00 0 ",  # where small arrays of a thread lie
                "7f2000001000-7f2003001000 rw-p 00000000 00:00 0 ",
                "7f2003001000-7f2003801000 rw-p 00000000 00:00 0 ",  # a stack beside it
                "7f2003801000-7f2006801000 r--p 00000000 00:00 0 ",
                "7f2006801000-7f2009801000 rw-s 00000000 00:01 0 ",
                f"7f3000001000-7f3010001000 rw-p 00000000 fe:00 77 /{'long/' * 300}name",
                "7f4000001000-7f4002000000 rw-p 00000000 00:00 0 ",  # less than 32 MiB
                "7f5000001000-7f5002001000 rw-p 00000000 00:00 0",
                "",
            ]
        )
    )
    assert list_large_mappings(path) == [(0x7F2000001000, 0x7F2003001000), (0x7F5000001000, 0x7F5002001000)]
    assert list_large_mappings(tmp_path / "none") == []


@pytest.mark.parametrize("count", [1, 9])
def test_the_numbers_are_returned(count):
    numbers = np.arange(count, dtype="int32")
    np.testing.assert_array_equal(open_step_memory(numbers), numbers)
