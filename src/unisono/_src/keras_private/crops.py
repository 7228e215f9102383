"""RandomCrop in a form that can be compiled."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
from jax import lax
from jax.core import Tracer

from unisono._src.keras_private.method_calls import Method, replaced
from unisono._src.keras_private.models import layers_of


def crop_by_slices(stock: Method) -> Method:
    """Return what `RandomCrop.transform_images` is to be in a trace.

    Keras cuts by `images[top : top + height]`, which JAX takes with known positions alone. The size is known, so that a slice at a
    traced position gives the same numbers. Everything else (an image no larger than the crop, which is resized) stays Keras'.
    """

    def transform_images(self: Any, images: Any, transformation: Any, training: bool = True) -> Any:
        top, left = transformation
        if not (training and isinstance(top, Tracer)):
            return stock(self, images, transformation, training)
        images = self.backend.cast(images, self.compute_dtype)
        images = lax.dynamic_slice_in_dim(images, top, self.height, self.height_axis)
        return lax.dynamic_slice_in_dim(images, left, self.width, self.width_axis)

    return transform_images


def compilable_crops(model: Any) -> contextlib.AbstractContextManager[None]:
    """Around a trace of the model: its layers RandomCrop are in the form that can be compiled."""
    if any(isinstance(layer, keras.layers.RandomCrop) for layer in layers_of(model)):
        return replaced({"crop": crop_by_slices})
    return contextlib.nullcontext()
