"""Lines of replica code that would train something else in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import keras
import numpy as np
from jax.core import Tracer

from unisono._src import keras_private
from unisono._src.replica.row_coupling import couples_rows, warn_of_coupling

MARK = "within_keras"
"""In the names of what layers, losses and metrics compute, where code is traced to be looked at."""
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Code(Protocol):
    """What the replica's code has done so far."""

    rows: Any
    replicas: int
    masks: list[Any]
    scope: Any
    inside: int
    """How many calls of layers and losses are around this line."""
    is_looked_at: bool
    suspicion: Callable[[Any], bool]

    def note(self, kind: str, arrays: Any, of: Any = None) -> Any: ...


def calls(code: Code) -> dict[str, Callable[[Any], Any]]:
    """What calls of Keras do in replica code."""
    return {
        "layer": lambda stock: lambda layer, *args, **kwargs: called(code, stock, layer, args, kwargs),
        "loss": lambda stock: lambda loss, *args, **kwargs: loss_called(code, stock, loss, *args, **kwargs),
        "mean": lambda stock: lambda metric, values, *args, **kwargs: mean_fed(code, stock, metric, values, *args, **kwargs),
        "metric": lambda _: lambda metric, *args, **kwargs: metric.update_state(*args, **kwargs),
    }


def called(code: Code, stock: Any, thing: Any, args: Any, kwargs: Any) -> Any:
    """A layer or a loss that replica code calls by itself: with rows of the replica, not with an array that is the same for all."""
    if not code.inside:
        args, kwargs, meant = opened((args, kwargs))
        check_given(code, thing, jax.tree.leaves((args, kwargs)), meant)
    with within(code):
        returned = stock(thing, *args, **kwargs)
    if not code.inside:
        code.note("gave", [leaf for leaf in jax.tree.leaves(returned) if isinstance(leaf, Tracer)], of=thing)
    return returned


def check_given(code: Code, thing: Any, leaves: list[Any], meant: list[Any]) -> None:
    """A layer is to get something of the replica's; of what a loss gets, everything is to be."""
    known = [*meant, *(keras_private.raw_value(v) for v in code.scope.read.values())]
    traced = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
    is_loss = isinstance(thing, keras.losses.Loss)
    for leaf in leaves if is_loss or not traced else ():
        if is_same_for_all(leaf) and not any(leaf is array for array in known) and code.suspicion(leaf):
            refuse_undistributed(leaf, f"as an argument of {thing.name!r}", code.replicas)
    for group in [[leaf] for leaf in traced] if is_loss else [traced]:
        code.note("given", group, of=thing)


@contextlib.contextmanager
def within(code: Code) -> Iterator[None]:
    """What a layer, a loss or a metric computes: arrays that it has by itself are its own affair."""
    code.inside += 1
    try:
        with jax.named_scope(MARK) if code.is_looked_at else contextlib.nullcontext():
            yield
    finally:
        code.inside -= 1


def opened(arguments: Any) -> tuple[Any, Any, list[Any]]:
    """(args, kwargs, the arrays in them of which the user has said that they are for all), with these as arrays."""
    is_meant = lambda leaf: getattr(type(leaf), "is_for_all", False)  # noqa: E731
    meant: list[Any] = []

    def bare(leaf: Any) -> Any:
        if not is_meant(leaf):
            return leaf
        meant.extend(jax.tree.leaves(leaf.value))
        return leaf.value

    args, kwargs = jax.tree.map(bare, arguments, is_leaf=is_meant)
    return args, kwargs, meant


def is_same_for_all(leaf: Any) -> bool:
    """An array that nobody computes from the replica's rows, of rows that differ."""
    return isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, Tracer) and bool(leaf.ndim) and rows_differ(leaf)


def rows_differ(array: Any) -> bool:
    """What is the same in every row, as labels that are all 1, are no rows of data."""
    rows = np.asarray(array)
    return not np.array_equal(rows[1:], rows[:-1])


class UndistributedError(ValueError):
    """Of an array that every replica would get whole."""

    array: Any


def refuse_undistributed(array: Any, how: str, replicas: int) -> None:
    shape = tuple(array.shape)
    error = UndistributedError(
        f"An array of shape {shape} reaches replica code {how} and is not distributed: every one of the {replicas} replicas would "
        f"train on the same {shape[0]} rows. Take the batches from a distributed dataset:\n\n"
        f"    for batch in strategy.distribute_dataset(dataset):\n        strategy.run(step, args=(batch,))\n\n"
        f"or, if every replica is meant to have the whole array, write un.replicate(array)."
    )
    error.array = array
    raise error


ACCUMULATE = (
    "Apply what earlier runs have accumulated outside of replica code:\n\n"
    "    for batch in batches:\n        strategy.run(accumulate, args=(batch,))\n"
    "    optimizer.apply([sum.value for sum in sums], model.trainable_variables)"
)


def refuse_same_gradients(optimizer: Any, replicas: int) -> None:
    raise ValueError(
        f"The replica's code applies gradients to the optimizer {optimizer.name!r} in which nothing comes from the replica's rows. They are the "
        f"same on all {replicas} replicas, and strategy.run adds up what replicas apply: the update would be {replicas} times too large. "
        f"{ACCUMULATE}"
    )


def refuse_summed_gradients(optimizer: Any, variable: Any, replicas: int) -> None:
    raise ValueError(
        f"The replica's code applies gradients to the optimizer {optimizer.name!r} in which the variable {variable.path!r} stands. By "
        f"aggregation='sum' each of the {replicas} replicas reads the sum that earlier runs have left, and strategy.run adds up what replicas "
        f"apply: that sum would count {replicas} times. {ACCUMULATE}"
    )


def loss_called(code: Code, stock: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """A mean over a replica's rows is refused. The mask of values for each row is kept: by it they are counted."""
    if loss.reduction in MEANS:
        raise ValueError(
            f"The loss {loss.name!r} has reduction={loss.reduction!r} and is called in replica code: it would divide by the {code.rows} "
            f"rows of a replica, and the gradients of {code.replicas} replicas, which are summed, would be {code.replicas} times too "
            f"large. Make it with reduction=None, and let the engine divide by the rows of the global batch:\n\n"
            f"    loss_fn = keras.losses.{class_of(loss)}(reduction=None)\n"
            f"    value, gradients = un.value_and_grad(lambda: loss_fn(y, model(x, training=True)), model.trainable_variables)"
        )
    if (
        code.is_looked_at
        and code.replicas > 1
        and not keras_private.is_loss_of_keras(loss)
        and couples_rows(loss.call, (y_true, y_pred))
    ):
        warn_of_coupling(f"The loss {loss.name!r}")
    mask = keras_private.get_keras_mask(y_pred)
    values = called(code, stock, loss, (y_true, y_pred, sample_weight), {})
    if mask is not None and mask.shape == values.shape:
        code.masks.append(mask)
    return values


def class_of(loss: Any) -> str:
    """The name of a loss' class, also where Keras has made one of a name like "mse"."""
    name = type(loss).__name__
    if name != "LossFunctionWrapper":
        return name
    made_of = getattr(loss.fn, "__name__", loss.name)
    return next((of for of in dir(keras.losses) if of.lower() == made_of.replace("_", "").lower()), name)


def mean_fed(code: Code, stock: Any, metric: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, Tracer):
            code.note("fed", leaf, metric)
    return stock(metric, values, *args, **kwargs)


def refuse_share(metric: Any, replicas: int) -> None:
    """Of a mean that is fed with a replica's share of the loss."""
    raise ValueError(
        f"The metric {metric.name!r} is a mean, and is fed with a replica's share of the loss, which is divided by the rows of the "
        f"global batch already: over {replicas} replicas it would say about 1/{replicas} of the loss (1.75 for a loss of "
        f"3.5 and two replicas). Feed it with one value for each example, or outside of replica code:\n\n"
        f'    loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)\n    {metric.name}.update_state(loss)'
    )


@contextlib.contextmanager
def unreadable(code: Code, metrics: Sequence[Any]) -> Iterator[None]:
    """For the block, what metrics say cannot be asked: a replica knows its own rows alone."""

    def updating(update: Callable[..., Any]) -> Callable[..., Any]:
        def updated(*args: Any, **kwargs: Any) -> Any:
            with within(code):
                return update(*args, **kwargs)

        return updated

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            if code.is_looked_at:
                stack.enter_context(keras_private.wrapped_method(metric, "update_state", updating))
            for name in ("result", "reset_state"):
                stack.enter_context(keras_private.wrapped_method(metric, name, lambda _, m=metric, n=name: refusing(m, n)))
        yield


def refusing(metric: Any, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"Replica code calls {metric.name}.{name}(), but a replica knows of its own rows alone. Update metrics in replica code, and "
            f"write {metric.name}.{name}() after strategy.run."
        )

    return refuse
