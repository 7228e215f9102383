"""A watch over the creation of Keras objects."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeAlias

import keras
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from unisono._src.keras.private.instances import Method
from unisono._src.keras.private.method_calls import set_class_attributes
from unisono._src.typing import KerasObject

TrackedObject: TypeAlias = keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric | keras.Variable
"""An object whose creation `CreationWatch` notices."""


class CreationWatch:
    """A watch over Keras' classes while a thread is inside. Any number of threads may enter it.

    It calls `made(thing)` for each new layer, optimizer, metric and variable, `model_made(model)` for each new model, and
    `model_used(model)` before a model is compiled or trained. Before and after, Keras' classes are unchanged.
    """

    def __init__(
        self,
        made: Callable[[TrackedObject], None],
        model_made: Callable[[keras.Model], None],
        model_used: Callable[[keras.Model], None],
    ) -> None:
        self._made = made
        self._model_made = model_made
        self._used = model_used
        self._entered = 0
        self._lock = threading.Lock()
        self._watched = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._watched.enter_context(set_class_attributes(self._make_methods()))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                self._watched.close()

    def _make_methods(self) -> dict[tuple[type, str], object]:
        return {
            (JAXTrainer, "__init__"): call_after(JAXTrainer.__init__, self._model_made),
            (BaseOptimizer, "__init__"): call_after(BaseOptimizer.__init__, self._made),
            (keras.metrics.Metric, "__init__"): call_after(keras.metrics.Metric.__init__, self._made),
            (keras.Variable, "__init__"): call_after(keras.Variable.__init__, self._made),
            # Not `__init__`, whose arguments Keras reads to know how to save a layer.
            (keras.Layer, "__new__"): staticmethod(call_after(keras.Layer.__new__, self._made)),
            (Trainer, "compile"): call_before(Trainer.compile, self._used),
            (JAXTrainer, "make_train_function"): call_before(JAXTrainer.make_train_function, self._used),
        }


def call_after(stock: Method, note: Callable[[KerasObject], None]) -> Method:
    """Wrap a method so that `note` gets the new object.

    It is the object that `__new__` returns, or the one that `__init__` was given.
    """

    @functools.wraps(stock)
    def method(cls_or_self: KerasObject, *args: KerasObject, **kwargs: KerasObject) -> KerasObject:
        result = stock(cls_or_self, *args, **kwargs)
        note(cls_or_self if result is None else result)
        return result

    return method


def call_before(stock: Method, note: Callable[[KerasObject], None]) -> Method:
    @functools.wraps(stock)
    def method(self: KerasObject, *args: KerasObject, **kwargs: KerasObject) -> KerasObject:
        note(self)
        return stock(self, *args, **kwargs)

    return method
