"""Tensors of a library that is not installed here: what Unisono asks of TensorFlow's and torch's."""

from __future__ import annotations

import types

import numpy as np


class Tensor:
    """As TensorFlow's: without a hash, and with a dtype of its own, to which NumPy is a stranger."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, value) -> None:
        self._value = np.asarray(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=self._value.dtype.name)

    def numpy(self) -> np.ndarray:
        return self._value

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self._value if dtype is None else self._value.astype(dtype)


class LentTensor:
    """Gives its values by DLPack alone."""

    def __init__(self, value) -> None:
        self._value = np.asarray(value)
        self.shape, self.dtype = self._value.shape, self._value.dtype.name

    def __dlpack__(self, **options):
        return self._value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._value.__dlpack_device__()
