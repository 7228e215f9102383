"""RandomCrop in a form that can be compiled."""

from __future__ import annotations

import contextlib

import keras
from jax import lax
from jax.core import Tracer

from unisono._src.keras.private.instances import Method
from unisono._src.keras.private.method_calls import replace_methods
from unisono._src.keras.private.models import list_layers
from unisono._src.typing import AnyArray, KerasObject


def crop_by_slices(stock: Method) -> Method:
    """Build the form of `RandomCrop.transform_images` for a trace.

    Keras cuts by `images[top : top + height]`, which JAX accepts only with known positions. The size is known, so that a slice at a traced
    position gives the same numbers. Everything else (an image no larger than the crop, which is resized) stays as in Keras.
    """

    def transform_images(
        self: KerasObject,
        images: AnyArray,
        transformation: tuple[int | AnyArray, int | AnyArray],
        training: bool = True,
    ) -> AnyArray:
        top, left = transformation
        if not (training and isinstance(top, Tracer)):
            return stock(self, images, transformation, training)
        images = self.backend.cast(images, self.compute_dtype)
        images = lax.dynamic_slice_in_dim(images, top, self.height, self.height_axis)
        return lax.dynamic_slice_in_dim(images, left, self.width, self.width_axis)

    return transform_images


def make_crops_compilable(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Open a context in which RandomCrop layers can be compiled. It is for a trace of the model."""
    if any(isinstance(layer, keras.layers.RandomCrop) for layer in list_layers(model)):
        return replace_methods({"crop": crop_by_slices})
    return contextlib.nullcontext()
