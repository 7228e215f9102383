"""Arrays of other libraries, such as TensorFlow's and torch's tensors.

They are found by what they can do, and read without importing the library.
"""

from __future__ import annotations

import types
from typing import Any, TypeGuard, cast

import keras
import numpy as np

from unisono._src.typing import LibraryArray


def has_values(thing: object) -> TypeGuard[LibraryArray]:
    """Whether this is an array that NumPy can read. It may be of any library. A Keras variable is none."""
    return (
        hasattr(thing, "shape")
        and hasattr(thing, "dtype")
        and (hasattr(thing, "__array__") or hasattr(thing, "__dlpack__"))
        and not isinstance(thing, keras.Variable | type | types.ModuleType)
    )


def read_values(array: LibraryArray) -> np.ndarray:
    """Read the values of an array of any library, on the host."""
    return np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(cast(Any, array))
