"""Linear algebra on one thread.

Programs on CPU call the LAPACK of SciPy for decompositions and for solutions of equations, and so does `keras.initializers.Orthogonal`. This
LAPACK has one thread for each core, and the number of threads changes bits.
"""

from __future__ import annotations

import functools

import scipy.linalg  # noqa: F401  # JAX imports it when it is first needed, and the library must be there before
from threadpoolctl import ThreadpoolController

NUMPY_LIBRARIES = "numpy.libs"
"""The folder of the library in NumPy's wheels. JAX does not call this library, which therefore keeps its threads."""


@functools.cache
def use_one_thread() -> None:
    """Limit LAPACK to one thread for as long as the process lives: a program may run at any time."""
    controller = ThreadpoolController()
    libraries = [library["filepath"] for library in controller.info() if library["user_api"] == "blas"]
    controller.select(filepath=[path for path in libraries if NUMPY_LIBRARIES not in path]).limit(limits=1)
