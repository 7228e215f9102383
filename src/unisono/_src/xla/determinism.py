"""What makes XLA compute the same bits each time, on every number of threads.

On GPU that is said in XLA_FLAGS, which XLA reads when JAX starts. What can be said for each compilation is said there, however the user has
started Python.
"""

from __future__ import annotations

import importlib.util
import os

FLAGS = {
    "xla_gpu_deterministic_ops": "true",  # no atomics; an op that has no other kernel is refused by XLA, by its name
    "xla_gpu_autotune_level": "0",  # kernels chosen by measuring are other ones in the next compilation
}
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {
        # All that jaxlib 0.10.2 gives to YNNPACK, but sums: it cuts those by the number of threads, and ends the process over some of
        # high rank. The names of all that stay have to be said; `-reduce` can be said in XLA_FLAGS alone.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
    }
}
"""By platform. Excess precision is off on all: else what is rounded to bfloat16 depends on what is fused."""


def compiler_options(platform: str) -> dict[str, str | bool]:
    """Return the options of each program of ours on this platform."""
    return {"xla_allow_excess_precision": False} | COMPILER_OPTIONS.get(platform, {})


GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
GPU_PLATFORMS = ("gpu", "cuda", "rocm")
OF_TENSORFLOW = "TF_DETERMINISTIC_OPS"


def set_flags() -> dict[str, str]:
    """The flags in XLA_FLAGS, by name."""
    said = (word.lstrip("-").partition("=") for word in os.environ.get("XLA_FLAGS", "").split())
    return {name: value or "true" for name, _, value in said}


def missing() -> list[str]:
    """What XLA_FLAGS does not say, as it should be written there."""
    said = set_flags()
    return [f"--{name}={value}" for name, value in FLAGS.items() if said.get(name, "").lower() != value]


def may_find_gpu() -> bool:
    """Whether JAX, when it starts, may find one."""
    allowed = os.environ.get("JAX_PLATFORMS", "")
    return (not allowed or any(name in allowed for name in GPU_PLATFORMS)) and any(
        importlib.util.find_spec(plugin) for plugin in GPU_PLUGINS
    )


def ask_for() -> None:
    """Before JAX starts: adds the flags of which the user has said nothing."""
    said = set_flags()
    flags = [flag for flag in missing() if flag.lstrip("-").partition("=")[0] not in said]
    if flags and may_find_gpu():
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])


def check(platforms: set[str]) -> None:
    """After JAX has started: raises where devices may give other bits each time."""
    flags = missing()
    if flags and not platforms.isdisjoint(GPU_PLATFORMS):
        raise RuntimeError(
            f"JAX runs on a GPU without {' '.join(flags)}, so that results may differ from run to run. Make the strategy before "
            f"anything starts JAX, or start Python with\n\n    XLA_FLAGS='{' '.join(flags)}'\n\nor write deterministic=False, for "
            f"results that promise nothing."
        )


def check_switch(deterministic: bool) -> None:
    """TensorFlow's environment variable must not say the opposite of the strategy."""
    value = os.environ.get(OF_TENSORFLOW, "").lower()
    if value in ("1", "true") and not deterministic:
        raise ValueError(
            f"{OF_TENSORFLOW}={os.environ[OF_TENSORFLOW]} asks for the same bits in every run, and deterministic=False gives that "
            f"up. Leave one of them out."
        )
    if value in ("0", "false") and deterministic:
        raise ValueError(
            f"{OF_TENSORFLOW}={os.environ[OF_TENSORFLOW]} switches determinism off, but a strategy is deterministic unless it is "
            f"told otherwise. Write deterministic=False, or leave the variable out."
        )
