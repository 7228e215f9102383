"""Calls of Keras' methods that mean something of their own for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer

Method = Callable[..., Any]

_replacing = threading.RLock()


@contextlib.contextmanager
def replaced(methods: Mapping[str, Callable[[Method], Method]]) -> Iterator[None]:
    """For the block and in this thread alone, calls of Keras' methods, by our names in `CALLS`, go to what `methods` makes of
    them."""
    thread = threading.get_ident()

    def in_place_of(stock: Method, ours: Method) -> Method:
        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (ours if threading.get_ident() == thread else stock)(self, *args, **kwargs)

        return method

    with _replacing:
        stocks = [(of, name, of.__dict__[name], wrap) for call, wrap in methods.items() for of, name in CALLS[call]]
        for of, name, stock, wrap in stocks:
            setattr(of, name, in_place_of(stock, wrap(stock)))
        try:
            yield
        finally:
            for of, name, stock, _ in stocks:
                setattr(of, name, stock)


OPTIMIZERS = (BaseOptimizer, LossScaleOptimizer, MultiOptimizer)

CALLS: dict[str, list[tuple[type, str]]] = {
    "apply": [(of, "apply") for of in OPTIMIZERS],
    "stateless_apply": [(of, "stateless_apply") for of in OPTIMIZERS if "stateless_apply" in of.__dict__],
    "scale_loss": [(of, "scale_loss") for of in OPTIMIZERS if "scale_loss" in of.__dict__],
    "layer": [(keras.Layer, "__call__")],
    "loss": [(keras.losses.Loss, "__call__")],
    "metric": [(keras.metrics.Metric, "__call__")],
    "mean": [(keras.metrics.Mean, "update_state")],
    "crop": [(keras.layers.RandomCrop, "transform_images")],
}
"""The calls that traced code makes of Keras and that mean something of their own there."""
