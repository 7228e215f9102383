"""Linear algebra on one thread.

Decompositions and solutions of equations are calls of the LAPACK that SciPy brings, in programs on CPU and when weights are initialized
(`keras.initializers.Orthogonal`). It has threads of its own, as many as there are cores, and their number changes bits.
"""

from __future__ import annotations

import functools

import scipy.linalg  # noqa: F401  # JAX imports it when it is first needed, and the library must be there before
from threadpoolctl import ThreadpoolController

OF_NUMPY = "numpy.libs"
"""Where NumPy's wheels keep a library of their own, which JAX does not call: it keeps its threads."""


@functools.cache
def use_one_thread() -> None:
    """Have LAPACK compute on one thread for as long as the process lives: a program may run at any time."""
    controller = ThreadpoolController()
    libraries = [library["filepath"] for library in controller.info() if library["user_api"] == "blas"]
    controller.select(filepath=[path for path in libraries if OF_NUMPY not in path]).limit(limits=1)
