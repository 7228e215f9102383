"""Models of a scope: their creation, the attributes that are set on them, and their layers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.layers.layer import Layer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from unisono._src.keras_private.instances import Method, set_untracked
from unisono._src.typing import KerasObject

TrackedObject: TypeAlias = keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric | keras.Variable
"""An object whose creation `CreationWatch` notices."""

TRAINER_METHODS = {
    "compile": "compile",
    "make_train_function": "make_train_function",
    "make_test_function": "make_test_function",
    "make_predict_function": "make_predict_function",
    "fit": "fit",
    "evaluate": "evaluate",
    "predict": "predict",
    "train_on_batch": "train_on_batch",
    "test_on_batch": "test_on_batch",
    "predict_on_batch": "predict_on_batch",
    "build_by": "_symbolic_build",
    "take_state": "_get_jax_state",
}
"""The methods that are set on a model of a scope: our names for methods of Keras' JAX trainer."""


BOND = "_unisono"
"""The attribute of a model of a scope that ties it to its strategy."""


INHERITED = object()
"""A mark for a method that a class inherits."""


class CreationWatch:
    """A watch over Keras' classes while a thread is inside of it; any number of threads may enter it.

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
        self._stock: dict[tuple[type, str], object] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._patch()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                for (cls, name), stock in self._stock.items():
                    if stock is INHERITED:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, stock)
                self._stock = {}

    def _patch(self) -> None:
        self._replace(JAXTrainer, "__init__", after=self._model_made)
        for cls in (BaseOptimizer, keras.metrics.Metric, keras.Variable):
            self._replace(cls, "__init__", after=self._made)
        self._watch_layers()
        self._replace(Trainer, "compile", before=self._used)
        self._replace(JAXTrainer, "make_train_function", before=self._used)

    def _watch_layers(self) -> None:
        """Watch layers by `__new__`: Keras reads the arguments of `__init__` to know how to save a layer."""
        stock = Layer.__dict__["__new__"]
        made = self._made
        self._stock[Layer, "__new__"] = stock

        def __new__(cls: type, *args: object, **kwargs: object) -> Layer:
            layer = stock(cls, *args, **kwargs)
            made(layer)
            return layer

        Layer.__new__ = staticmethod(__new__)

    def _replace(
        self,
        cls: type,
        name: str,
        before: Callable[[KerasObject], None] | None = None,
        after: Callable[[KerasObject], None] | None = None,
    ) -> None:
        stock = getattr(cls, name)
        self._stock[cls, name] = vars(cls).get(name, INHERITED)

        @functools.wraps(stock)
        def method(self: KerasObject, *args: KerasObject, **kwargs: KerasObject) -> KerasObject:
            if before is not None:
                before(self)
            result = stock(self, *args, **kwargs)
            if after is not None:
                after(self)
            return result

        setattr(cls, name, method)


def get_bond(model: object) -> Any | None:
    """Return the bond between the model and the strategy in whose scope it was made; None for a model outside of scopes."""
    return getattr(model, BOND, None)


def get_class_method(model: keras.Model, name: str) -> Method:
    """Return the method of the model's class, by our name, even if another one was set on the model."""
    return getattr(type(model), TRAINER_METHODS[name]).__get__(model)


def release_state(model: keras.Model) -> None:
    """Write the state into the variables and drop all other references to it, at the end of a loop, however it ended."""
    model.jax_state_sync()
    set_untracked(model, "_jax_state", None)


def list_layers(model: keras.Layer) -> list[keras.Layer]:
    """Return a model or a layer with all its inner layers."""
    return list(model._flatten_layers())


def supports_jit(model: keras.Model) -> bool:
    """Return whether all layers of the model declare that they can be compiled. If one does not, Keras compiles nothing."""
    return all(layer.supports_jit for layer in list_layers(model))


def find_eager_option(model: keras.Model) -> str | None:
    """Return the option of compile() that forbids to compile steps; None if they are compiled.

    If a layer does not declare that it can be compiled, Keras' `jit_compile` is False by default; most such layers can be compiled on JAX.
    """
    if model.run_eagerly:
        return "run_eagerly=True"
    return "jit_compile=False" if not model.jit_compile and supports_jit(model) else None


def is_built(model: keras.Layer) -> bool:
    return all(layer.built for layer in list_layers(model))


def overrides_method(model: keras.Model, method: str) -> bool:
    """Return whether the model's class overrides a method of Keras' trainer."""
    return getattr(type(model), method) is not getattr(keras.Model, method)
