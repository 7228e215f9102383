"""Attributes of one object, set without Keras' tracking."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer

from unisono._src.typing import KerasObject

Method: TypeAlias = Callable[..., KerasObject]
"""A method of Keras, or a function in its place."""

TRAINER_MODULES = ("keras.src.backend.jax.trainer", "keras.src.trainers.trainer")
JAX_TRAINER, TRAINER = (next(base for base in keras.Model.__mro__ if base.__module__ == module) for module in TRAINER_MODULES)
"""The bases of a model that train it: the one for JAX, and the one for all backends. Keras 3.16 has other names for both."""

UNSET = object()
"""A mark for an attribute that the object lacks, and its class or a base has."""


def set_untracked(model: object, name: str, value: object) -> None:
    """Set an attribute without Keras' tracking of layers and variables."""
    object.__setattr__(model, name, value)


@contextlib.contextmanager
def wrap_method(instance: object, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Wrap `instance.name` for the block, on this one object."""
    before = vars(instance).get(name, UNSET)
    set_untracked(instance, name, wrap(getattr(instance, name)))
    try:
        yield
    finally:
        if before is UNSET:
            object.__delattr__(instance, name)
        else:
            set_untracked(instance, name, before)


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
            (JAX_TRAINER, "__init__"): call_after(JAX_TRAINER.__init__, self._model_made),
            (BaseOptimizer, "__init__"): call_after(BaseOptimizer.__init__, self._made),
            (keras.metrics.Metric, "__init__"): call_after(keras.metrics.Metric.__init__, self._made),
            (keras.Variable, "__init__"): call_after(keras.Variable.__init__, self._made),
            # Not `__init__`, whose arguments Keras reads to know how to save a layer.
            (keras.Layer, "__new__"): staticmethod(call_after(keras.Layer.__new__, self._made)),
            (TRAINER, "compile"): call_before(vars(TRAINER)["compile"], self._used),
            (JAX_TRAINER, "make_train_function"): call_before(vars(JAX_TRAINER)["make_train_function"], self._used),
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
