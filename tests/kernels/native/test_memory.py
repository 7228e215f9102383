"""Where there is no memory for a kernel, JAX raises, and the process goes on."""

from __future__ import annotations

import sys

import pytest

from processes import python
from unisono._src.kernels.native.library import load_kernels

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason)),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux"),
]

CODE = """
import resource, sys
import unisono, jax, numpy as np
import jax.numpy as jnp
from unisono._src.kernels.native.convolutions import call_convolution
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.rewriting import rewrite_function

def attend(q, k, v):
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)

load_kernels()
convolve = lambda x, y: call_convolution(x, y, (1, 1), (1, 1), (0, 0), (1, 1))
shapes, call = {
    "the caller": (((1, 1, 1, 1 << 21), (1, 1, 1 << 21, 1)), convolve),
    "threads": (
        ((1, 256, 16), (1, 300_000, 16)), rewrite_function(lambda q, k: rewrite_before_gradient(attend)(q, k, k), "cpu")
    ),
}[sys.argv[1]]
arrays = [jax.device_put(np.ones(shape, "float32")) for shape in shapes]
run = jax.jit(call).lower(*arrays).compile()
small = np.ones((1, 1, 128, 128), "float32")
convolve(small[:, :, :1, :], small).block_until_ready()  # what JAX makes at the first call, it has then
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (96 << 20), limits[1]))
try:
    run(*arrays).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(str(error).splitlines()[0])
resource.setrlimit(resource.RLIMIT_AS, limits)
print(np.asarray(run(*arrays)).sum())
"""


@pytest.mark.parametrize(
    ("where", "kernel", "total"),
    [
        ("the caller", "unisono_convolve", float(1 << 21)),
        ("threads", "unisono_attend", 256.0 * 16),
    ],
)
def test_a_kernel_without_memory_raises(where, kernel, total):
    done = python("-c", CODE, where)
    assert done.returncode == 0, done.stderr[-2000:]
    said, result = done.stdout.splitlines()
    start, _, rest = said.partition(" bytes ")
    assert start.startswith(f"RESOURCE_EXHAUSTED: The kernel {kernel} asked for ")
    assert int(start.rpartition(" ")[2]) > 96 << 20
    assert rest == "of memory, and there is no more. Use smaller batches, or more replicas."
    assert float(result) == total


TWO_DEVICES = """
import resource
import unisono, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.exchange.in_program import DeviceGroups
from unisono._src.engine.step.running_sums import add_over_devices
from unisono._src.kernels.native.convolutions import call_convolution
from unisono._src.kernels.rewriting import rewrite_function

mesh, groups = get_mesh(tuple(jax.devices())), DeviceGroups()
convolve = lambda x, y: call_convolution(x, y, (1, 1), (1, 1), (0, 0), (1, 1)).sum()

def run(numbers, sums):
    def fill(shape):
        return jnp.full(shape, sums["float32"][0, 0])
    large = lambda: convolve(fill((1, 1, 1, 1 << 21)), fill((1, 1, 1 << 21, 1)))
    sums = {"float32": sums["float32"] + jax.lax.cond(numbers[0, 1] == 1, large, lambda: jnp.float32(1 << 21))}
    return add_over_devices(sums, *numbers[0], phase=0)

nodes = [(range(0, 1), True), (range(1, 2), True)]
ask = lambda: mesh.put_blocks([np.array([[groups.find(2, nodes), device]], np.int32) for device in (0, 1)])
sums = {"float32": mesh.put_blocks([np.ones((1, 4), "float32")] * 2)}
program = jax.jit(rewrite_function(mesh.map_blocks(run, cut=True, cut_results=True), "cpu"))
compiled = program.lower(ask(), sums).compile()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (96 << 20), limits[1]))
try:
    jax.block_until_ready(compiled(ask(), sums))
except jax.errors.JaxRuntimeError as error:
    print("no more" in str(error))
resource.setrlimit(resource.RLIMIT_AS, limits)
print(np.asarray(compiled(ask(), sums)["float32"])[:, 0].astype(int).tolist())
"""


def test_a_device_without_memory_leaves_no_other_waiting():
    """The others, which wait to add up with it, get its error. The next call adds up."""
    done = python("-c", TWO_DEVICES, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["True", "[4194306, 4194306]"]
