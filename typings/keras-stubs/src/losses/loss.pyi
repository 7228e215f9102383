# keras.losses.Loss of Keras 3.15 on the JAX backend, and the functions that weigh and reduce losses.

from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike
from keras.src.saving.keras_saveable import KerasSaveable

DType = str | np.dtype[Any]

class Loss(KerasSaveable):
    name: str
    reduction: str
    def __init__(
        self, name: str | None = None, reduction: str | None = "sum_over_batch_size", dtype: str | None = None
    ) -> None: ...
    @property
    def dtype(self) -> str: ...
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Array: ...
    def call(self, y_true: Any, y_pred: Any) -> Array: ...
    def get_config(self) -> dict[str, Any]: ...

def squeeze_or_expand_to_same_rank(x1: Array, x2: Array, expand_rank_1: bool = True) -> tuple[Array, Array]: ...
def reduce_weighted_values(
    values: ArrayLike,
    sample_weight: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: DType | None = None,
) -> Array: ...
def apply_mask(sample_weight: Array | None, mask: Array | None, dtype: DType, reduction: str | None) -> Array | None: ...
