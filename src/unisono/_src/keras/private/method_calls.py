"""Methods of Keras' classes, replaced for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer

from unisono._src.keras.private.instances import UNSET, Method
from unisono._src.typing import KerasObject

_replacing = threading.RLock()


@contextlib.contextmanager
def replace_methods(methods: Mapping[str, Callable[[Method], Method]]) -> Iterator[None]:
    """Replace methods of Keras for the block, in this thread only.

    The keys of `methods` are our names in `CALLS`; each value returns, from Keras' method, the function that is called in its place.
    """
    thread = threading.get_ident()

    def replace_in_thread(stock: Method, ours: Method) -> Method:
        @functools.wraps(stock)
        def method(self: KerasObject, *args: KerasObject, **kwargs: KerasObject) -> KerasObject:
            return (ours if threading.get_ident() == thread else stock)(self, *args, **kwargs)

        return method

    with _replacing:
        stocks = {place: vars(place[0])[place[1]] for call in methods for place in CALLS[call]}
        replaced = {
            place: replace_in_thread(stocks[place], wrap(stocks[place]))
            for call, wrap in methods.items()
            for place in CALLS[call]
        }
        with set_class_attributes(replaced):
            yield


@contextlib.contextmanager
def set_class_attributes(attributes: Mapping[tuple[type, str], object]) -> Iterator[None]:
    """Set attributes of classes for the block."""
    before = {(cls, name): vars(cls).get(name, UNSET) for cls, name in attributes}
    for (cls, name), value in attributes.items():
        setattr(cls, name, value)
    try:
        yield
    finally:
        for (cls, name), value in before.items():
            if value is UNSET:
                delattr(cls, name)  # the class inherits it
            else:
                setattr(cls, name, value)


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
