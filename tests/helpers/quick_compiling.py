"""XLA's quicker ways to compile, for the programs of `.ci/run`: most of their time on a machine that has kept none.

The steps in which the engine looks at how numbers grow hold callbacks to Python, and no program with one is ever kept: those are compiled
the second time too.

What a program computes is decided before, by its text: rows, divisors, orders of sums, keys. Compiled for users is what depends on the code
that XLA makes of it: tests that take the fixture `compiled_for_users`, processes that are started with `processes.FOR_USERS`, and
everything in the other targets.
"""

from __future__ import annotations

import os

import jaxlib.version

HAS_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
"""Whether XLA has the option to compile without its fusion emitters. XLA ends a process over the name of an option that it does not have."""

QUICK: dict[str, str | int | bool] = {
    **({"xla_cpu_use_fusion_emitters": False} if HAS_OLDER_EMITTERS else {}),
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
FOR_USERS: dict[str, str | int | bool] = {
    **({"xla_cpu_use_fusion_emitters": True} if HAS_OLDER_EMITTERS else {}),
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_parallel_codegen_split_count": 32,
}
"""The defaults of jaxlib 0.10.2 and 0.12.0."""


def is_wanted() -> bool:
    """Return whether this is a target of `.ci/run`: `make test`, `make test-processes` or `make compat`."""
    return os.environ.get("UNISONO_TESTS") == "quick"


def ask_for() -> None:
    """Set the flags, of which XLA takes note when it starts."""
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), format_flags()])


def format_flags() -> str:
    """Return the quicker options as flags of XLA."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
