"""Scopes of strategies: objects made inside a scope belong to its strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import keras

from unisono._src.hidden_frames import PUBLIC_CALL
from unisono._src.keras.checks import refusals
from unisono._src.keras.checks.jax_errors import explain_read_attributes
from unisono._src.keras.cut_weights import cut_new_weight
from unisono._src.keras.distributed.replica_strategy import SCOPES, ReplicaStrategy
from unisono._src.keras.fit.keras_hooks import bind_trainer
from unisono._src.keras.loop import tf_names
from unisono._src.keras.private.instances import CreationWatch, TrackedObject

S = TypeVar("S", bound=ReplicaStrategy)


@contextlib.contextmanager
def open_scope(strategy: S) -> Iterator[S]:
    """Open the scope of a strategy. A scope may be entered again inside itself; scopes of two strategies never mix."""
    outer = SCOPES.innermost
    with PUBLIC_CALL:
        if outer is not None and outer is not strategy:
            raise RuntimeError(
                f"This is the scope of {outer!r}; the scope of {strategy!r} cannot begin inside it. Leave the first scope before you "
                f"enter another."
            )
    with _watch, tf_names.NAMES, explain_read_attributes():
        SCOPES.open.append(strategy)
        try:
            yield strategy
        finally:
            SCOPES.open.pop()


def own_created(created: TrackedObject) -> None:
    """Give a new object of Keras to the strategy of the scope.

    It is a layer, optimizer, metric or variable. Outside of scopes nothing is done.
    """
    if SCOPES.innermost is not None:  # else another thread is in a scope
        SCOPES.innermost.owned.add(created)
        if isinstance(created, keras.Variable):
            cut_new_weight(created, SCOPES.innermost)
        if isinstance(created, keras.metrics.Metric):
            tf_names.add_reset_states(created)
        if isinstance(created, keras.optimizers.Optimizer):
            refusals.watch_optimizer(created)


def bind_model(model: keras.Model) -> None:
    """Tie a new model to the strategy of the scope around. The strategy then trains it."""
    if SCOPES.innermost is not None:
        bind_trainer(model, SCOPES.innermost)


def check_scope_of_model(model: keras.Model) -> None:
    """Refuse to compile or train a model in another strategy's scope."""
    refusals.check_model_scope(model, SCOPES.innermost)


_watch = CreationWatch(made=own_created, model_made=bind_model, model_used=check_scope_of_model)
