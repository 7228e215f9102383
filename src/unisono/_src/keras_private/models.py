"""Models of a scope: how they are noticed, what is set on them, and what they are made of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.layers.layer import Layer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from unisono._src.keras_private.instances import set_on

METHODS = {
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
"""What is set on a model of a scope: our names for methods of Keras' JAX trainer."""


BOND = "_unisono"
"""The attribute by which a model of a scope knows what ties it to its strategy."""


INHERITED = object()
"""Stands for a method that a class has from another."""


class Watch:
    """While it is entered, by however many threads: calls `made(thing)` for each layer, optimizer, metric and variable made,
    `model_made(model)` for each model, and `model_used(model)` before a model is compiled or trained. Keras' classes are the stock
    objects before and after."""

    def __init__(self, made: Callable[[Any], None], model_made: Callable[[Any], None], model_used: Callable[[Any], None]) -> None:
        self._made = made
        self._model_made = model_made
        self._used = model_used
        self._entered = 0
        self._lock = threading.Lock()
        self._stock: dict[tuple[type, str], Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._patch()

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                for (of, name), stock in self._stock.items():
                    if stock is INHERITED:
                        delattr(of, name)
                    else:
                        setattr(of, name, stock)
                self._stock = {}

    def _patch(self) -> None:
        self._replace(JAXTrainer, "__init__", after=self._model_made)
        for of in (BaseOptimizer, keras.metrics.Metric, keras.Variable):
            self._replace(of, "__init__", after=self._made)
        self._watch_layers()
        self._replace(Trainer, "compile", before=self._used)
        self._replace(JAXTrainer, "make_train_function", before=self._used)

    def _watch_layers(self) -> None:
        """By `__new__`: Keras reads the arguments of `__init__` to know how to save a layer."""
        stock, made = Layer.__dict__["__new__"], self._made
        self._stock[Layer, "__new__"] = stock

        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            layer = stock(cls, *args, **kwargs)
            made(layer)
            return layer

        Layer.__new__ = staticmethod(__new__)

    def _replace(self, of: type, name: str, before: Callable[[Any], None] | None = None, after: Any = None) -> None:
        stock = getattr(of, name)
        self._stock[of, name] = vars(of).get(name, INHERITED)

        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(self)
            result = stock(self, *args, **kwargs)
            if after is not None:
                after(self)
            return result

        setattr(of, name, method)


def bond_of(model: Any) -> Any | None:
    """What ties the model to the strategy in whose scope it was made; None outside."""
    return getattr(model, BOND, None)


def of_class(model: Any, name: str) -> Callable[..., Any]:
    """The method of the model's class, by our name, behind one that was set on the model."""
    return getattr(type(model), METHODS[name]).__get__(model)


def drop_state(model: Any) -> None:
    """The end of a loop, however it ended: the variables hold the state again, and nothing else does."""
    model.jax_state_sync()
    set_on(model, "_jax_state", None)


def layers_of(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def says_it_compiles(model: Any) -> bool:
    """Whether all layers of the model say so. Where one does not, Keras compiles nothing; most such layers can be compiled on JAX."""
    return all(layer.supports_jit for layer in layers_of(model))


def eager_option(model: Any) -> str | None:
    """What compile() was given that says that steps are not to be compiled; None where they are.

    Where a layer does not say that it compiles, Keras' `jit_compile` is False without being asked; most such layers can be compiled on JAX.
    """
    if model.run_eagerly:
        return "run_eagerly=True"
    return "jit_compile=False" if not model.jit_compile and says_it_compiles(model) else None


def is_built(model: Any) -> bool:
    return all(layer.built for layer in layers_of(model))


def overrides(model: Any, method: str) -> bool:
    """Whether the model's class has a method of its own in place of Keras' trainer's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)
