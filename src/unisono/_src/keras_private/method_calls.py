"""Calls of Keras' methods that have a meaning of ours for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer

from unisono._src.keras_private.instances import Method
from unisono._src.typing import KerasObject

_replacing = threading.RLock()


@contextlib.contextmanager
def replace_methods(methods: Mapping[str, Callable[[Method], Method]]) -> Iterator[None]:
    """Replace methods of Keras for the block, in this thread only.

    The keys of `methods` are our names in `CALLS`; each value returns, from Keras' method, the function that is called in its place.
    """
    thread = threading.get_ident()

    def in_place_of(stock: Method, ours: Method) -> Method:
        @functools.wraps(stock)
        def method(self: KerasObject, *args: KerasObject, **kwargs: KerasObject) -> KerasObject:
            return (ours if threading.get_ident() == thread else stock)(self, *args, **kwargs)

        return method

    with _replacing:
        stocks = [(cls, name, cls.__dict__[name], wrap) for call, wrap in methods.items() for cls, name in CALLS[call]]
        for cls, name, stock, wrap in stocks:
            setattr(cls, name, in_place_of(stock, wrap(stock)))
        try:
            yield
        finally:
            for cls, name, stock, _ in stocks:
                setattr(cls, name, stock)


OPTIMIZERS = (BaseOptimizer, LossScaleOptimizer, MultiOptimizer)

CALLS: dict[str, list[tuple[type, str]]] = {
    "apply": [(cls, "apply") for cls in OPTIMIZERS],
    "stateless_apply": [(cls, "stateless_apply") for cls in OPTIMIZERS if "stateless_apply" in cls.__dict__],
    "scale_loss": [(cls, "scale_loss") for cls in OPTIMIZERS if "scale_loss" in cls.__dict__],
    "layer": [(keras.Layer, "__call__")],
    "loss": [(keras.losses.Loss, "__call__")],
    "metric": [(keras.metrics.Metric, "__call__")],
    "mean": [(keras.metrics.Mean, "update_state")],
    "crop": [(keras.layers.RandomCrop, "transform_images")],
}
"""Calls of Keras in traced code, by our names, that have a meaning of ours there."""
