"""The masks that Keras ties to tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask

MASKS = "_keras_mask_dict"
"""The name of Keras' dict of masks, for tensors that take no attributes, such as traced ones."""


@contextlib.contextmanager
def hide_masks() -> Iterator[None]:
    """Hide all masks for the block, which is a trace. Only tensors that get a mask in it have one.

    Keras 3.15.1 knows the masks of traced tensors by `id()`, in a dict of the thread, and forgets a mask when its tensor is collected. If
    another thread collects the tensor (for example one that writes a checkpoint), the mask stays, for the next tensor with this id.
    """
    before = global_state.get_global_attribute(MASKS)
    global_state.set_global_attribute(MASKS, {})
    try:
        yield
    finally:
        global_state.set_global_attribute(MASKS, before)
