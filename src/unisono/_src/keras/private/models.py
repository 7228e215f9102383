"""A model's layers, and the methods of its trainer."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.core import Tracer
from keras.src import backend

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.private.data_adapters import unpack_batch
from unisono._src.keras.private.instances import Method, replace_methods, set_untracked
from unisono._src.keras.private.trainer_state import write_back_state
from unisono._src.typing import AnyArray, KerasObject, Outputs, UserBatch

PRIVATE_METHODS = {"build_by": ("_symbolic_build", "_maybe_symbolic_build"), "take_state": ("_get_jax_state",)}
"""Our names for private methods of Keras' trainer. Of several, later ones call the first, and not every version of Keras has them."""


def name_methods(name: str) -> list[str]:
    """List Keras' names of a method, by Keras' name or ours."""
    return [method for method in PRIVATE_METHODS.get(name, (name,)) if hasattr(keras.Model, method)]


def get_class_method(model: keras.Model, name: str) -> Method:
    """Get a method of the model's class, under Keras' name or ours. A method that was set on the model itself is passed over."""
    return getattr(type(model), name_methods(name)[0]).__get__(model)


def replace_trainer_method(model: keras.Model, name: str, method: Method) -> None:
    """Set a method on one model, under Keras' name or ours. It keeps the signature and docstring of the class' method."""
    for name_of_keras in name_methods(name):

        @functools.wraps(getattr(type(model), name_of_keras))
        def call_ours(*args: KerasObject, **kwargs: KerasObject) -> KerasObject:
            with PUBLIC_CALL:
                return method(*args, **kwargs)

        set_untracked(model, name_of_keras, call_ours)


def release_state(model: keras.Model) -> None:
    """Write the state into the variables and drop other references. To be called at the end of a loop, however it ended."""
    write_back_state(model)
    set_untracked(model, "_jax_state", None)


def list_layers(model: keras.Layer) -> list[keras.Layer]:
    """List a model or a layer with all its inner layers."""
    return list(model._flatten_layers())


def supports_jit(model: keras.Model) -> bool:
    """Whether all layers declare that they can be compiled. If one does not, Keras compiles nothing."""
    return all(layer.supports_jit for layer in list_layers(model))


def find_eager_option(model: keras.Model) -> str | None:
    """Find the option of compile() that forbids compiled steps. None if steps are compiled.

    If a layer does not declare that it can be compiled, Keras' `jit_compile` is False by default; most such layers can be compiled on JAX.
    """
    if model.run_eagerly:
        return "run_eagerly=True"
    return "jit_compile=False" if not model.jit_compile and supports_jit(model) else None


def is_built(model: keras.Layer) -> bool:
    return all(layer.built for layer in list_layers(model))


def overrides_method(model: keras.Model, method: str) -> bool:
    """Whether the model's class overrides a method of Keras' trainer."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


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
        images = keras.ops.cast(images, self.compute_dtype)
        images = lax.dynamic_slice_in_dim(images, top, self.height, self.height_axis)
        return lax.dynamic_slice_in_dim(images, left, self.width, self.width_axis)

    return transform_images


def make_crops_compilable(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Open a context in which RandomCrop layers can be compiled. It is for a trace of the model."""
    if any(isinstance(layer, keras.layers.RandomCrop) for layer in list_layers(model)):
        return replace_methods({"crop": crop_by_slices})
    return contextlib.nullcontext()


def describe_outputs(model: keras.Model, x: UserBatch) -> Outputs:
    """Describe the outputs of a model in shapes, for inputs in shapes."""
    symbolic = jax.tree.map(lambda array: keras.KerasTensor(array.shape, backend.standardize_dtype(array.dtype)), x)
    return backend.compute_output_spec(model, symbolic, training=False)


def needs_batch(model: keras.Model) -> bool:
    """Whether Keras needs a batch to build model, metrics or losses."""
    containers = [container for container in (model._compile_metrics, model._compile_loss) if container is not None]
    return not all(part.built for part in [*list_layers(model), *containers])


def build_by_calling(model: keras.Model, batch: UserBatch) -> None:
    """Build what Keras could not build without values.

    The forward pass, the metrics and the losses run on these rows.

    Variables that had a value before keep it, and metrics are reset.
    """
    x, y, sample_weight = jax.tree.map(jnp.asarray, unpack_batch(batch))
    before = [(variable, variable.value) for variable in model.variables]
    y_pred = model(x, training=False)
    for _ in list_layers(model):  # a layer counts as built only if all its inner layers were built before the call
        if is_built(model):
            break
        y_pred = model(x, training=False)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    model._compute_loss(x, y, y_pred, sample_weight=sample_weight, training=False)
    for variable, value in before:
        variable.assign(value)
    model.reset_metrics()
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
