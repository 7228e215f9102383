"""Losses, metrics and the forward pass of a compiled model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras.src import backend
from keras.src.trainers.compile_utils import CompileMetrics

from unisono._src.keras_private.crops import compilable_crops


def loss_terms(model: Any) -> list[Any]:
    """The losses of compile(), one for each output that has one, as (path, loss, weight, name).

    None where a `compute_loss` of the model's own never asks for them: Keras builds them when they are first called.
    """
    whole = model._compile_loss
    return list(whole._flat_losses) if whole is not None and whole.built else []


def term_trackers(model: Any) -> list[Any]:
    """The metrics that follow each loss term, where there is more than one."""
    whole = model._compile_loss
    return [] if whole is None else list(whole.metrics)


@contextlib.contextmanager
def other_losses(model: Any, losses: list[Callable[..., Any]]) -> Iterator[None]:
    """Puts `losses` in the places of the model's own, inside Keras' matching of structures, and stops their trackers."""
    whole = model._compile_loss
    if whole is None or not whole.built:
        yield
        return
    twin = object.__new__(type(whole))  # not copy.copy: Keras' objects copy themselves by saving
    twin.__dict__.update(whole.__dict__)
    terms = [term._replace(loss=loss) for term, loss in zip(whole._flat_losses, losses, strict=True)]
    object.__setattr__(twin, "_flat_losses", terms)
    object.__setattr__(twin, "_metrics", [None] * len(terms) if len(terms) > 1 else [])
    object.__setattr__(model, "_compile_loss", twin)
    try:
        yield
    finally:
        object.__setattr__(model, "_compile_loss", whole)


def compiled_loss(model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The weighted sum of the loss terms of compile(); None without any."""
    return None if model._compile_loss is None else model._compile_loss(y, y_pred, sample_weight)


def computed_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """What the model's own `compute_loss` returns."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def call_model(model: Any, x: Any, training: bool) -> Any:
    """The forward pass of a training step, inside a scope that holds the state.

    As Keras' own, but for one thing: layers that cast nothing by themselves (Embedding) add up their gradients in float32 in mixed
    precision, as they do where a loop calls `model(x)`.
    """
    forget_losses(model)
    mixed = model.compute_dtype != model.variable_dtype and backend.is_float_dtype(model.compute_dtype)
    with compilable_crops(model), backend.AutocastScope(model.compute_dtype) if mixed else contextlib.nullcontext():
        return _called(model, x, training)


def _called(model: Any, x: Any, training: bool) -> Any:
    kwargs = {"training": training} if model._call_has_training_arg else {}
    if model.dtype_policy.quantization_mode is not None:
        return model.quantized_call(x, **kwargs)
    if model._remat_mode is not None:
        return model.rematerialized_call(model.call, x, **kwargs)(x, **kwargs)
    return model.call(x, **kwargs)


def forget_losses(model: Any) -> None:
    """Before each trace. Layers know the losses that they added by `id()`. Those of an earlier trace may be the ids of this
    one's losses by now, and a layer that is called then takes another's loss out of the scope, in plain Keras too."""
    model._clear_losses()


def weight_regularizers(model: Any) -> int:
    """Return how many of `model.losses`, the last ones, are of regularized weights."""
    return sum(weight.regularizer is not None for weight in model.trainable_weights)


def loss_tracker(model: Any) -> Any:
    return model._loss_tracker


def leaf_metrics(model: Any) -> list[Any]:
    """The metrics of compile() and of the layers, but not the loss trackers."""
    trackers = [loss_tracker(model), *term_trackers(model)]
    metrics = [m for m in model.metrics if not any(m is tracker for tracker in trackers)]
    return [leaf for m in metrics for leaf in (m.metrics if isinstance(m, CompileMetrics) else [m])]


def leaf_metrics_of(model: Any) -> list[Any]:
    """All metrics of a model, the loss trackers among them, without those that only hold others."""
    return [leaf for m in model.metrics for leaf in (m.metrics if isinstance(m, CompileMetrics) else [m])]


def is_class_of_keras(metric: Any) -> bool:
    return type(metric).__module__.startswith("keras.")


def is_loss_of_keras(loss: Any) -> bool:
    """Whether neither the loss' class nor the function that it wraps is the user's."""
    function = getattr(loss, "fn", None)
    return is_class_of_keras(loss) and (function is None or getattr(function, "__module__", "").startswith("keras."))


def is_of_keras(metric: Any) -> bool:
    """Whether neither the metric's class nor the function that it takes the mean of is the user's."""
    function = getattr(metric, "_fn", None)
    return is_class_of_keras(metric) and (function is None or getattr(function, "__module__", "").startswith("keras."))
