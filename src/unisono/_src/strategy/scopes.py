"""Scopes of strategies: objects made inside a scope belong to its strategy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import keras

from unisono._src.checks import refusals
from unisono._src.fit import keras_hooks
from unisono._src.keras_private.models import CreationWatch
from unisono._src.loop import tf_names
from unisono._src.typing import UserObject

if TYPE_CHECKING:
    from unisono._src.strategy.base import Strategy


class Scopes(threading.local):
    """The strategies whose scopes this thread is in, innermost last."""

    def __init__(self) -> None:
        self.open: list[Strategy] = []
        self.acting: list[Strategy] = []
        """Strategies whose steps call user code, in a scope or not."""


_scopes = Scopes()


def get_innermost_strategy() -> Strategy | None:
    """Return the strategy of the innermost scope around; None outside of every scope."""
    return _scopes.open[-1] if _scopes.open else None


def get_acting_strategy() -> Strategy | None:
    """Return the strategy whose step calls this code; None where no step does."""
    return _scopes.acting[-1] if _scopes.acting else None


@contextlib.contextmanager
def act_as_strategy(strategy: Strategy) -> Iterator[None]:
    """Make this the strategy that user code finds, for the block of a step."""
    _scopes.acting.append(strategy)
    try:
        yield
    finally:
        _scopes.acting.pop()


@contextlib.contextmanager
def open_scope(strategy: Strategy) -> Iterator[Strategy]:
    """Open the scope of a strategy. A scope may be entered again inside itself; scopes of two strategies never mix."""
    outer = get_innermost_strategy()
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


def own_created(created: UserObject) -> None:
    """Give a new layer, optimizer, metric or variable to the strategy of the scope around, if there is one."""
    strategy = get_innermost_strategy()
    if strategy is not None:
        strategy.owned.add(created)
        if isinstance(created, keras.metrics.Metric):
            tf_names.add_reset_states(created)
        if isinstance(created, keras.optimizers.Optimizer):
            refusals.watch_optimizer(created)


def bind_model(model: keras.Model) -> None:
    """Tie a new model to the strategy of the scope around, which then trains it."""
    strategy = get_innermost_strategy()
    if strategy is not None:
        keras_hooks.Bond(model, strategy)


def check_scope_of_model(model: keras.Model) -> None:
    """Refuse to compile or train a model in a scope of another strategy."""
    strategy = get_innermost_strategy()
    if strategy is not None:
        refusals.check_model_scope(model, strategy, keras_hooks.find_owning_strategy(model))


_watch = CreationWatch(made=own_created, model_made=bind_model, model_used=check_scope_of_model)
