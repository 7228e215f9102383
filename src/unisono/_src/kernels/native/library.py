"""The library of kernels that this process uses, or why none.

The libraries lie beside this file if they could be compiled when Unisono was installed: one for each level of the processor's
instructions. The bits of a result depend on the library, so a run's facts hold its level and its build.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import re
from typing import NamedTuple

import jax

CPUINFO = pathlib.Path("/proc/cpuinfo")

INSTRUCTIONS = ("flags", "Features")
"""Names of a core's instructions in /proc/cpuinfo: on x86, and on Arm."""


def read_cores() -> list[dict[str, str]]:
    """Read the description of each core, by name. It is empty where the system gives none.

    A part without instructions is no core: on some Arm machines the last part is about the board.
    """
    try:
        text = CPUINFO.read_text()
    except OSError:
        return []
    cores = map(parse_core, text.split("\n\n"))
    return [core for core in cores if get_instructions(core)]


def parse_core(lines: str) -> dict[str, str]:
    """Parse the description of one core, by name.

    >>> parse_core("model\\t\\t: 17\\nflags\\t\\t: fpu avx2")
    {'model': '17', 'flags': 'fpu avx2'}
    """
    pairs = (line.partition(":") for line in lines.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def get_instructions(core: dict[str, str]) -> str:
    """The names of a core's instructions, in Linux's order. Empty where it gives none."""
    return next((core[name] for name in INSTRUCTIONS if core.get(name)), "")


def list_common_instructions() -> set[str]:
    """List the instructions that all cores have. The set is empty where the system gives none."""
    cores = read_cores()
    return set.intersection(*(set(get_instructions(core).split()) for core in cores)) if cores else set()


FOLDER = pathlib.Path(__file__).parent / "libraries"
REASON = FOLDER / "reason.txt"
"""Why there is no library, where none could be compiled."""

SWITCH = "UNISONO_NATIVE"
"""The environment variable that switches the kernels off with 0, or chooses a level."""

NATIVE = "native"
"""The first word of the description of native kernels."""

NEEDED = {
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"),
    "avx2": ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"),
    "neon": ("asimd",),
}
"""The levels, best first, with the processor's instructions that each needs, in Linux's words."""

TARGETS = (
    "unisono_all_reduce",
    "unisono_attend",
    "unisono_attend_gradient",
    "unisono_come_after",
    "unisono_convolve",
    "unisono_convolve_depthwise",
    "unisono_convolve_with_bias",
    "unisono_convolution_kernel_gradient",
    "unisono_depthwise_kernel_gradient",
    "unisono_digest_parts",
    "unisono_keep_array",
    "unisono_measure_columns",
    "unisono_multiply",
    "unisono_multiply_gated",
    "unisono_multiply_transposed",
    "unisono_multiply_with_bias",
    "unisono_normalize_rows",
    "unisono_normalize_rows_gradient",
    "unisono_open_step",
    "unisono_push_contribution",
    "unisono_put_together",
    "unisono_run_row_loop",
    "unisono_sum_columns",
    "unisono_sum_gated_columns",
)
"""The kernels, by the names that compiled programs call them by."""


class Kernels(NamedTuple):
    """The kernels in use, or why there are none."""

    level: str | None
    build: str | None
    reason: str | None = None

    def __str__(self) -> str:
        return f"native kernels for {self.level}, build {self.build}" if self.level else f"no native kernels: {self.reason}"

    @property
    def is_switched_off(self) -> bool:
        return self.reason == f"{SWITCH}=0"

    @property
    def description(self) -> str:
        """The facts about kernels that a run's bits depend on."""
        return f"{NATIVE} {self.level}, build {self.build}" if self.level else "XLA's"


@functools.cache
def load_kernels() -> Kernels:
    """The kernels of this process. The first call loads their library and registers it with XLA."""
    try:
        level = choose_level()
        return register_library(level, load_library(level))
    except KernelsUnavailableError as error:
        return Kernels(None, None, str(error))


@functools.cache
def load_in_use() -> ctypes.CDLL | None:
    """The library of the kernels in use. None where there are none."""
    level = load_kernels().level
    return None if level is None else load_library(level)


class KernelsUnavailableError(Exception):
    """Why the kernels cannot be used."""


def choose_level() -> str:
    """Choose the best level of this processor, or the user's choice. Only levels with a library count."""
    chosen = os.environ.get(SWITCH, "1")
    if chosen == "0":
        raise KernelsUnavailableError(f"{SWITCH}=0")
    if chosen not in ("1", *NEEDED):
        raise ValueError(f"{SWITCH}={chosen} is none of 0, 1, {', '.join(NEEDED)}.")
    built = [level for level in NEEDED if find_library(level).exists()]
    if not built:
        raise KernelsUnavailableError(
            REASON.read_text().strip() if REASON.exists() else "they were not compiled for this platform"
        )
    instructions = list_common_instructions()
    possible = [level for level in built if instructions.issuperset(NEEDED[level])]
    if chosen != "1" and chosen not in possible:
        raise ValueError(f"{SWITCH}={chosen} cannot be used here; possible are 0, {', '.join(possible)}.")
    if not possible:
        raise KernelsUnavailableError(f"this processor has the instructions of none of {', '.join(built)}")
    return possible[0] if chosen == "1" else chosen


def find_library(level: str) -> pathlib.Path:
    return FOLDER / f"kernels-{level}.so"


def load_library(level: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(find_library(level)))
    except OSError as error:  # it is damaged, or was compiled on a newer system
        raise KernelsUnavailableError(f"their library cannot be loaded: {error}") from error


def register_library(level: str, library: ctypes.CDLL) -> Kernels:
    """Register the kernels of a library with XLA. Both must have the same version of XLA's interface."""
    ours = library.unisono_ffi_major(), library.unisono_ffi_minor()
    theirs = read_interface_version()
    if ours[0] != theirs[0] or ours[1] > theirs[1]:
        versions = (".".join(map(str, version)) for version in (ours, theirs))
        raise KernelsUnavailableError("they were compiled for version {} of XLA's interface, and jaxlib has {}".format(*versions))
    library.unisono_build.restype = ctypes.c_char_p
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return Kernels(level, library.unisono_build().decode())


def read_interface_version() -> tuple[int, int]:
    """Read the version of XLA's kernel interface from the installed jaxlib."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    major, minor = re.findall(r"^#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header.read_text(), re.MULTILINE)
    return int(major), int(minor)
