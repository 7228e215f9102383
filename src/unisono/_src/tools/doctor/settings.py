"""Findings about settings: flags, environment variables, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono._src.engine.xla import determinism, runtime
from unisono._src.programs.private.backends import THREADS_VARIABLE
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict
from unisono._src.typed_jax import settings

SECTION = "settings"

BEYOND_FLAGS = "not by flags: the kernels of another driver, cuDNN or cuBLAS"
"""What the flags for GPUs miss: Unisono compiles without excess precision by an option, and versions are compared, not set."""

EXCESS_PRECISION = "xla_allow_excess_precision"
DEVICE_COUNT = "xla_force_host_platform_device_count"
KNOWN_FLAGS = {*determinism.FLAGS, EXCESS_PRECISION, DEVICE_COUNT}


def examine_gpu_flags() -> Iterator[Finding]:
    """Find whether GPU kernels are deterministic.

    They are if JAX chooses them without measuring, and they add in a fixed order.
    """
    flags = " ".join(f"--{name}={value}" for name, value in determinism.FLAGS.items())
    set_flags = determinism.read_xla_flags()
    wrong = [flag for flag in determinism.list_missing_flags() if flag.lstrip("-").partition("=")[0] in set_flags]
    if wrong:
        yield Finding(
            SECTION,
            "GPU flags",
            f"XLA_FLAGS asks for something else than {' '.join(wrong)}: on a GPU, results may differ from run to run",
            PromiseVerdict.BREAKS if determinism.can_find_gpu() else PromiseVerdict.NOTE,
            f"XLA_FLAGS='{flags}', or leave the flag out: Unisono sets it",
        )
    elif not determinism.can_find_gpu():
        yield Finding(SECTION, "GPU flags", "not needed: JAX has no plugin for GPUs here")
    else:
        missing = determinism.list_missing_flags()
        by = f"a strategy adds {' '.join(missing)} before JAX starts" if missing else f"{flags} is set"
        yield Finding(SECTION, "GPU flags", f"{by}; {BEYOND_FLAGS}")


def examine_excess_precision() -> Iterator[Finding]:
    """Find whether results may be rounded later than the program says."""
    if determinism.get_compiler_options("cpu").get(EXCESS_PRECISION) is not False:
        yield Finding(SECTION, "excess precision", "on: rounding to bfloat16 depends on fusion", PromiseVerdict.BREAKS)
        return
    fact = "off in each program of Unisono, so that rounding to bfloat16 does not depend on fusion"
    if determinism.read_xla_flags().get(EXCESS_PRECISION, "").lower() == "true":
        yield Finding(
            SECTION, "excess precision", f"{fact}; the flag in XLA_FLAGS holds for other programs alone", PromiseVerdict.NOTE
        )
    else:
        yield Finding(SECTION, "excess precision", fact)


def examine_threads() -> Iterator[Finding]:
    """Find whether JAX would have the two threads that it needs."""
    threads = runtime.count_threads()
    cores = runtime.count_cores()
    if threads >= runtime.FEWEST_THREADS:
        yield Finding(SECTION, "CPU threads", f"{threads} on {cores} core{'s' * (cores != 1)}; their number changes no bit")
    elif THREADS_VARIABLE not in os.environ:
        yield Finding(SECTION, "CPU threads", f"1 core; a strategy has JAX start {runtime.FEWEST_THREADS} threads")
    else:
        yield Finding(
            SECTION,
            "CPU threads",
            f"{THREADS_VARIABLE}={threads}: for one thread alone, XLA makes other code",
            PromiseVerdict.BREAKS,
            f"{THREADS_VARIABLE}={runtime.FEWEST_THREADS}, or leave it out",
        )


def examine_tensorflow_switch() -> Iterator[Finding]:
    """Find whether TensorFlow's variable contradicts deterministic strategies. If it does not, there is no finding."""
    name = determinism.TENSORFLOW_VARIABLE
    try:
        determinism.check_tensorflow_switch(deterministic=True)
    except ValueError:
        fact = f"{os.environ[name]} switches determinism off, and a deterministic strategy refuses it"
        yield Finding(SECTION, name, fact, PromiseVerdict.BREAKS, f"{name}=1, or leave it out")


def examine_other_flags() -> Iterator[Finding]:
    """Yield a note on flags of XLA that are not Unisono's."""
    others = {name: value for name, value in determinism.read_xla_flags().items() if name not in KNOWN_FLAGS}
    if others:
        written = " ".join(f"--{name}={value}" for name, value in others.items())
        yield Finding(
            SECTION,
            "XLA_FLAGS",
            f"{written}: may change bits; a run belongs to its flags",
            PromiseVerdict.NOTE,
            "the same XLA_FLAGS for all processes, and when a training resumes; or leave it out",
        )


def examine_jax_settings() -> Iterator[Finding]:
    """Yield notes on settings of JAX that make another run."""
    if settings.jax_enable_x64:
        yield Finding(
            SECTION,
            "jax_enable_x64",
            "on: bits are not those of a run without it, and models with float64 variables are refused",
            PromiseVerdict.NOTE,
            "leave JAX_ENABLE_X64 out",
        )
    if settings.jax_default_matmul_precision is not None:
        precision = settings.jax_default_matmul_precision
        yield Finding(SECTION, "matmul precision", f"{precision}: another run than with the default", PromiseVerdict.NOTE)
