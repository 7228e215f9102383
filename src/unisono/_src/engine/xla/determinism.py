"""Flags and options that make XLA deterministic.

It then computes the same bits each time, on every number of threads. On GPU the flags are in XLA_FLAGS, which XLA reads when JAX
starts. Options that a compilation can take are given to each compilation, however the user has started Python.
"""

from __future__ import annotations

import importlib.util
import os

import jax

from unisono._src.programs.private.backends import make_cpu_device

NO_MEASURING = "xla_gpu_deterministic_ops"
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"

FLAGS = {
    # No atomics; XLA refuses an operation that has no other kernel, and names it. No kernels are chosen by measuring, whatever
    # xla_gpu_autotune_level says; with level 0, XLA takes far slower convolutions of cuDNN.
    NO_MEASURING: "true",
}
GRAPH_PARTS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUDNN",
    "CONVOLUTION",
    "CUSTOM_CALL",
    "DYNAMIC_SLICE_FUSION",
    "WHILE",
    "CONDITIONAL",
)
"""The operations that XLA puts into CUDA graphs. With the loops among them, the host starts the steps of a call at once. It does not read
from the device in each step whether there is another one. This changes no bit."""
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {
        # All operations that jaxlib 0.10.2 gives to YNNPACK, except sums: YNNPACK cuts sums by the number of threads, and some of high rank
        # end the process. The option must name all operations that stay; `-reduce` is possible in XLA_FLAGS alone.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
    },
    "gpu": {
        COMMAND_BUFFERS: ",".join(GRAPH_PARTS),
        # Without measuring, matmuls by cuBLAS are faster than those that XLA has Triton compile: 7 % of a transformer's step on an H100.
        TRITON_PRODUCTS: False,
    },
}
"""By platform. Excess precision is off on all platforms: else the rounding to bfloat16 depends on fusion."""


def get_compiler_options(platform: str) -> dict[str, str | bool]:
    """The compiler options of each of our programs on a platform.

    A GPU option that XLA_FLAGS sets is left out, so the user's value holds.
    """
    set_flags = read_xla_flags()
    users = {name for name in COMPILER_OPTIONS["gpu"] if name in set_flags}
    if set_flags.get(NO_MEASURING, "").lower() != "true":
        users.add(TRITON_PRODUCTS)
    options = COMPILER_OPTIONS.get(platform, {}).items()
    return {"xla_allow_excess_precision": False} | {name: value for name, value in options if name not in users}


CPU_PARTS = 16
"""XLA cuts the loops of a CPU program into parts, at most one for each thread, and makes other machine code for another number of parts:
it may fuse other multiplications and additions. So programs are compiled for this number of threads, wherever they run."""


def choose_compile_device(device: jax.Device) -> jax.Device:
    """Choose the device to compile for. The machine code is then loaded on the device that runs it."""
    return make_cpu_device(CPU_PARTS) if device.platform == "cpu" else device


GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
GPU_PLATFORMS = ("gpu", "cuda", "rocm")
TENSORFLOW_VARIABLE = "TF_DETERMINISTIC_OPS"


def read_xla_flags() -> dict[str, str]:
    """The flags in XLA_FLAGS, by name."""
    pairs = (word.lstrip("-").partition("=") for word in os.environ.get("XLA_FLAGS", "").split())
    return {name: value or "true" for name, _, value in pairs}


def list_missing_flags() -> list[str]:
    """List the flags that XLA_FLAGS lacks, as they should be written there."""
    set_flags = read_xla_flags()
    return [f"--{name}={value}" for name, value in FLAGS.items() if set_flags.get(name, "").lower() != value]


def can_find_gpu() -> bool:
    """Whether JAX may find a GPU when it starts."""
    allowed = os.environ.get("JAX_PLATFORMS", "")
    return (not allowed or any(name in allowed for name in GPU_PLATFORMS)) and any(
        importlib.util.find_spec(plugin) for plugin in GPU_PLUGINS
    )


def add_missing_flags() -> None:
    """Add the flags that the user has not set to XLA_FLAGS. JAX must not have started."""
    set_flags = read_xla_flags()
    flags = [f"--{name}={value}" for name, value in FLAGS.items() if name not in set_flags]
    if flags and can_find_gpu():
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])


def check_flags(platforms: set[str]) -> None:
    """Refuse a GPU whose results may differ from run to run. JAX must have started."""
    flags = list_missing_flags()
    if flags and not platforms.isdisjoint(GPU_PLATFORMS):
        raise RuntimeError(
            f"JAX runs on a GPU without {' '.join(flags)}, so that results may differ from run to run. Make the strategy before "
            f"anything starts JAX, or start Python with\n\n    XLA_FLAGS='{' '.join(flags)}'\n\nor write deterministic=False, for "
            f"results that promise nothing."
        )


def check_tensorflow_switch(deterministic: bool) -> None:
    """Refuse a setting of TensorFlow's environment variable that contradicts the strategy."""
    value = os.environ.get(TENSORFLOW_VARIABLE, "").lower()
    if value in ("1", "true") and not deterministic:
        raise ValueError(
            f"{TENSORFLOW_VARIABLE}={os.environ[TENSORFLOW_VARIABLE]} asks for the same bits in every run, and deterministic=False gives that "
            f"up. Leave one of them out."
        )
    if value in ("0", "false") and deterministic:
        raise ValueError(
            f"{TENSORFLOW_VARIABLE}={os.environ[TENSORFLOW_VARIABLE]} switches determinism off, but a strategy is deterministic unless it is "
            f"told otherwise. Write deterministic=False, or leave the variable out."
        )
