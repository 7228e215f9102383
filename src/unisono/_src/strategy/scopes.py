"""Scopes: what is made inside of one belongs to its strategy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras

from unisono._src import keras_private
from unisono._src.checks import refusals
from unisono._src.fit import keras_hooks
from unisono._src.loop import tf_names


class Scopes(threading.local):
    """The strategies whose scopes this thread is in, innermost last."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.acting: list[Any] = []
        """Strategies whose steps call code of the user's, in a scope or not."""


_scopes = Scopes()


def innermost() -> Any:
    """The strategy of the scope around; None outside of every scope."""
    return _scopes.open[-1] if _scopes.open else None


def acting() -> Any:
    """Return the strategy whose step calls this code; None where no step does."""
    return _scopes.acting[-1] if _scopes.acting else None


@contextlib.contextmanager
def act(strategy: Any) -> Iterator[None]:
    """For the block, code that a step calls finds its strategy."""
    _scopes.acting.append(strategy)
    try:
        yield
    finally:
        _scopes.acting.pop()


@contextlib.contextmanager
def inside(strategy: Any) -> Iterator[Any]:
    """The scope of a strategy. It may be entered again inside itself; those of two strategies never mix."""
    outer = innermost()
    if outer is not None and outer is not strategy:
        raise RuntimeError(
            f"This is the scope of {outer!r}; the scope of {strategy!r} cannot begin inside it. Leave the first scope before you "
            f"enter another."
        )
    with _watch, tf_names.NAMES:
        _scopes.open.append(strategy)
        try:
            yield strategy
        finally:
            _scopes.open.pop()


def made(thing: Any) -> None:
    """What is made in a scope of this thread belongs to its strategy."""
    strategy = innermost()
    if strategy is not None:
        strategy.owned.add(thing)
        if isinstance(thing, keras.metrics.Metric):
            tf_names.name_metric(thing)
        if isinstance(thing, keras.optimizers.Optimizer):
            refusals.watch_apply(thing)


def model_made(model: Any) -> None:
    """A model that is trained uses its strategy."""
    strategy = innermost()
    if strategy is not None:
        keras_hooks.Bond(model, strategy)


def model_used(model: Any) -> None:
    """A model that is compiled or trained in a scope of this thread must have been made in that strategy's."""
    strategy = innermost()
    if strategy is not None:
        refusals.check_made_here(model, strategy, keras_hooks.belongs_to(model))


_watch = keras_private.Watch(made=made, model_made=model_made, model_used=model_used)
