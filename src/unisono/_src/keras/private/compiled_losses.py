"""Losses, metrics and the forward pass of a compiled model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import keras
from jax import Array
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
from keras.src.backend.common.variables import AutocastScope, is_float_dtype
from keras.src.losses.loss import apply_mask as apply_mask
from keras.src.losses.loss import reduce_weighted_values as reduce_weighted_values
from keras.src.losses.loss import squeeze_or_expand_to_same_rank as squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileMetrics

from unisono._src.keras.private.models import make_crops_compilable
from unisono._src.typing import KerasObject, Outputs, PyTree, UserObject


def list_term_trackers(model: keras.Model) -> list[keras.metrics.Metric]:
    """List the metrics of the loss terms; empty for a single term."""
    compiled = model._compile_loss
    return [] if compiled is None else list(compiled.metrics)


def get_given_loss(model: keras.Model) -> UserObject:
    """Get the loss as compile() was given it. None if there is none."""
    return None if model._compile_loss is None else model._compile_loss._user_loss


@contextlib.contextmanager
def wrap_losses(model: keras.Model, wrap: Callable[[Callable[..., Array]], Callable[..., Array]]) -> Generator[None]:
    """Wrap the losses of compile() for the block. Keras builds them at their first call, which may be in the block."""
    compiled = model._compile_loss
    if compiled is None:
        yield
        return
    twin = object.__new__(type(compiled))  # copy.copy would save and load: Keras' objects copy themselves so

    def wrap_terms() -> None:
        twin.__dict__.update(compiled.__dict__)
        terms = [term._replace(loss=wrap(term.loss)) for term in compiled._flat_losses]
        object.__setattr__(twin, "_flat_losses", terms)

    def build(y_true: PyTree, y_pred: PyTree) -> None:
        compiled.build(y_true, y_pred)
        wrap_terms()

    if compiled.built:
        wrap_terms()
    else:
        twin.__dict__.update(compiled.__dict__)
        object.__setattr__(twin, "build", build)
    object.__setattr__(model, "_compile_loss", twin)
    try:
        yield
    finally:
        object.__setattr__(model, "_compile_loss", compiled)


def call_model(model: keras.Model, x: PyTree, training: bool) -> Outputs:
    """Call the model's forward pass as a training step does.

    The call is inside a scope that holds the state.

    The forward pass is Keras' own, with one difference: in mixed precision, layers that do not cast by themselves (Embedding) add up their
    gradients in float32, as they do if a loop calls `model(x)`. Variables of the model itself are not cast, as in Keras' steps.
    """
    forget_added_losses(model)
    is_mixed = model.compute_dtype != model.variable_dtype and is_float_dtype(model.compute_dtype)
    kwargs = {"training": training} if model._call_has_training_arg else {}
    casts = autocast_layers(model) if is_mixed else contextlib.nullcontext()
    with make_crops_compilable(model), casts, tell_layers(model, training):
        if model.dtype_policy.quantization_mode is not None:
            return model.quantized_call(x, **kwargs)
        if model._remat_mode is not None:
            return model.rematerialized_call(model.call, x, **kwargs)(x, **kwargs)
        return model.call(x, **kwargs)


@contextlib.contextmanager
def tell_layers(model: keras.Model, training: bool) -> Iterator[None]:
    """Tell the layers that are called in the block whether it is training, where their callers do not say so."""
    model._get_call_context().set_value("training", training)
    try:
        yield
    finally:
        model._maybe_reset_call_context()


@contextlib.contextmanager
def autocast_layers(model: keras.Model) -> Generator[None]:
    """Cast the layers' variables to the model's precision in the block. The model's own variables are not cast."""
    own = [variable for variable in (*model._trainable_variables, *model._non_trainable_variables) if variable._autocast]
    for variable in own:
        variable._autocast = False
    try:
        with AutocastScope(model.compute_dtype):
            yield
    finally:
        for variable in own:
            variable._autocast = True


def forget_added_losses(model: keras.Model) -> None:
    """Clear the losses that layers have added, before each trace.

    A layer knows its added losses by `id()`. An id from an earlier trace may by now belong to a loss of this trace. A layer that is called
    then takes the loss of another layer out of the scope, in plain Keras too.
    """
    model._clear_losses()


def get_loss_tracker(model: keras.Model) -> KerasObject:
    """Get the metric that tracks the loss; None before compile()."""
    return model._loss_tracker


def list_all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """List all metrics of a model, including the loss trackers. Metrics that only contain others are left out."""
    return [leaf for metric in model.metrics for leaf in (metric.metrics if isinstance(metric, CompileMetrics) else [metric])]


def is_class_of_keras(metric: object) -> bool:
    return type(metric).__module__.startswith("keras.")


def is_loss_of_keras(loss: object) -> bool:
    """Whether the loss' class and its wrapped function are Keras' own."""
    return is_class_of_keras(loss) and is_function_of_keras(getattr(loss, "fn", None))


class ClassOptions(NamedTuple):
    """The options of a loss that takes integer labels."""

    axis: int
    """The axis of the classes in predictions."""
    ignored: int | None
    """The label of values that do not count in the loss; None for no such label."""


def find_class_options(loss: object) -> ClassOptions | None:
    """Find the options of a loss with integer labels. None for any other loss."""
    if not isinstance(loss, LossFunctionWrapper) or loss.fn is not keras.losses.sparse_categorical_crossentropy:
        return None
    options = loss._fn_kwargs
    return ClassOptions(options.get("axis", -1), options.get("ignore_class"))


def is_function_of_keras(function: Callable[..., Array] | None) -> bool:
    return function is None or getattr(function, "__module__", "").startswith("keras.")


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
