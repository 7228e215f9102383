"""Refuse calls in replica code that would silently train another model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, TypeGuard, TypeVar

import jax
import keras
import numpy as np

from unisono._src.keras.private.compiled_losses import get_keras_mask
from unisono._src.keras.private.instances import wrap_method
from unisono._src.keras.private.trainer_state import ReadingScope, get_raw_value
from unisono._src.keras.replica.replicated import Replicated
from unisono._src.typed_jax import map_tree
from unisono._src.typing import AnyArray, Arguments, Array, KerasObject, Keywords, LibraryArray, PyTree, is_plain_array, is_traced

T = TypeVar("T")

Method: TypeAlias = Callable[..., Any]
"""A method of a Keras class, with the object as its first argument."""

KERAS_MARK = "within_keras"
"""In the names of the operations of layers, losses and metrics, where code is traced to be inspected."""
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class CodeRecord(Protocol):
    """The record of what the replica's code has done so far."""

    rows: int | None
    replicas: int
    masks: list[Array]
    inside: int
    """How many calls of layers and losses are around this line."""
    is_inspected: bool
    may_be_rows: Callable[[AnyArray], bool]

    @property
    def scope(self) -> ReadingScope: ...

    def note(self, kind: str, arrays: T, origin: object = None) -> T: ...


def wrap_keras_calls(code: CodeRecord) -> dict[str, Callable[[Method], Method]]:
    """The wrappers of Keras' methods for replica code, by call name."""
    return {
        "layer": lambda stock: functools.partial(call_layer_or_loss, code, stock),
        "loss": lambda stock: functools.partial(call_loss, code, stock),
        "mean": lambda stock: functools.partial(feed_mean, code, stock),
        "metric": lambda _: update_metric,
    }


def update_metric(metric: keras.metrics.Metric, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Update a metric that is called. Its result would be that of one replica."""
    return metric.update_state(*args, **kwargs)


def call_layer_or_loss(
    code: CodeRecord, stock: Method, called: keras.Layer | keras.losses.Loss, /, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Call a layer or a loss that replica code uses.

    Arrays that are the same for all replicas are refused in place of the replica's rows.
    """
    if not code.inside:
        args, kwargs, meant = unwrap_replicated((args, kwargs))
        check_call_arguments(code, called, jax.tree.leaves((args, kwargs)), meant)
    with enter_keras_code(code):
        returned = stock(called, *args, **kwargs)
    if not code.inside:
        code.note("gave", [leaf for leaf in jax.tree.leaves(returned) if is_traced(leaf)], origin=called)
    return returned


def check_call_arguments(code: CodeRecord, called: KerasObject, leaves: list[object], meant: list[AnyArray]) -> None:
    """Refuse layers and losses that do not get the replica's rows.

    Of a layer one argument is enough; of a loss each must come from the replica.
    """
    known = [*meant, *(get_raw_value(variable) for variable in code.scope.read.values())]
    traced = [leaf for leaf in leaves if is_traced(leaf)]
    is_loss = isinstance(called, keras.losses.Loss)
    for leaf in leaves if is_loss or not traced else ():
        if is_undistributed(leaf) and not any(leaf is array for array in known) and code.may_be_rows(leaf):
            refuse_undistributed(leaf, f"as an argument of {called.name!r}", code.replicas)
    for group in [[leaf] for leaf in traced] if is_loss else [traced]:
        code.note("given", group, origin=called)


@contextlib.contextmanager
def enter_keras_code(code: CodeRecord) -> Generator[None]:
    """Mark the block as code of Keras. A layer, a loss or a metric may use arrays of its own."""
    code.inside += 1
    try:
        with jax.named_scope(KERAS_MARK) if code.is_inspected else contextlib.nullcontext():
            yield
    finally:
        code.inside -= 1


def unwrap_replicated(arguments: tuple[Arguments, Keywords]) -> tuple[Arguments, Keywords, list[AnyArray]]:
    """Unwrap `Replicated` arguments: (args, kwargs, the arrays in them)."""
    meant: list[AnyArray] = []

    def is_replicated(leaf: object) -> TypeGuard[Replicated]:
        return isinstance(leaf, Replicated)

    def unwrap(leaf: PyTree) -> PyTree:
        if not is_replicated(leaf):
            return leaf
        meant.extend(jax.tree.leaves(leaf.value))
        return leaf.value

    args, kwargs = map_tree(unwrap, arguments, is_leaf=is_replicated)
    return args, kwargs, meant


def is_undistributed(leaf: object) -> TypeGuard[AnyArray]:
    """Whether a leaf is an array of differing rows from outside. It was not computed from the replica's rows."""
    return is_plain_array(leaf) and not is_traced(leaf) and bool(leaf.ndim) and has_different_rows(leaf)


def has_different_rows(array: LibraryArray) -> bool:
    """Whether an array has rows that differ. Equal rows, as labels that are all 1, are no data."""
    rows = np.asarray(array)
    return not np.array_equal(rows[1:], rows[:-1])


class UndistributedError(ValueError):
    """The error about an array that every replica would get whole."""

    array: LibraryArray


def refuse_undistributed(array: LibraryArray, how: str, replicas: int) -> NoReturn:
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


def refuse_same_gradients(optimizer: keras.optimizers.Optimizer, replicas: int) -> NoReturn:
    raise ValueError(
        f"The replica's code applies gradients to the optimizer {optimizer.name!r} in which nothing comes from the replica's rows. They are the "
        f"same on all {replicas} replicas, and strategy.run adds up what replicas apply: the update would be {replicas} times too large. "
        f"{ACCUMULATE}"
    )


def refuse_summed_gradients(optimizer: keras.optimizers.Optimizer, variable: keras.Variable, replicas: int) -> NoReturn:
    raise ValueError(
        f"The replica's code applies gradients to the optimizer {optimizer.name!r} in which the variable {variable.path!r} stands. By "
        f"aggregation='sum' each of the {replicas} replicas reads the sum that earlier runs have left, and strategy.run adds up what replicas "
        f"apply: that sum would count {replicas} times. {ACCUMULATE}"
    )


def call_loss(
    code: CodeRecord,
    stock: Method,
    loss: keras.losses.Loss,
    y_true: PyTree,
    y_pred: PyTree,
    sample_weight: AnyArray | None = None,
) -> PyTree:
    """Call a loss in replica code, and keep its mask. Rows are counted by the mask. A mean over a replica's rows is refused."""
    if loss.reduction in MEANS:
        raise ValueError(
            f"The loss {loss.name!r} has reduction={loss.reduction!r} and is called in replica code: it would divide by the {code.rows} "
            f"rows of a replica, and the gradients of {code.replicas} replicas, which are summed, would be {code.replicas} times too "
            f"large. Make it with reduction=None, and let the engine divide by the rows of the global batch:\n\n"
            f"    loss_fn = keras.losses.{loss_class_name(loss)}(reduction=None)\n"
            f"    value, gradients = un.value_and_grad(lambda: loss_fn(y, model(x, training=True)), model.trainable_variables)"
        )
    mask = get_keras_mask(y_pred)
    values = call_layer_or_loss(code, stock, loss, y_true, y_pred, sample_weight)
    if mask is not None and mask.shape == values.shape:
        code.masks.append(mask)
    return values


def loss_class_name(loss: KerasObject) -> str:
    """The name of a loss' class. Keras makes an object of another class of a name like "mse"."""
    name = type(loss).__name__
    if name != "LossFunctionWrapper":
        return name
    function_name = getattr(loss.fn, "__name__", loss.name)
    class_names = dir(keras.losses)
    return next((candidate for candidate in class_names if candidate.lower() == function_name.replace("_", "").lower()), name)


def feed_mean(
    code: CodeRecord, stock: Method, metric: keras.metrics.Mean, values: PyTree, *args: object, **kwargs: object
) -> PyTree:
    """Update a mean in replica code, and note its arrays."""
    for leaf in jax.tree.leaves(values):
        if is_traced(leaf):
            code.note("fed", leaf, metric)
    return stock(metric, values, *args, **kwargs)


def refuse_mean_of_part(metric: keras.metrics.Metric, why: str) -> NoReturn:
    """Refuse to feed a mean with a number of some rows."""
    raise ValueError(
        f"The metric {metric.name!r} is a mean, and is fed with {why} Feed it with one value for each example, with ops.mean of them, or with "
        f"the share of the loss that un.value_and_grad returned in the same run: metrics take the value that the code has on all rows of the "
        f"global batch."
    )


@contextlib.contextmanager
def refuse_metric_reads(code: CodeRecord, metrics: Sequence[keras.metrics.Metric]) -> Generator[None]:
    """Refuse to read or reset metrics in the block. A replica knows its own rows alone."""

    def wrap_update(update: Callable[..., None]) -> Callable[..., None]:
        def update_within_keras(*args: object, **kwargs: object) -> None:
            with enter_keras_code(code):
                return update(*args, **kwargs)

        return update_within_keras

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            if code.is_inspected:
                stack.enter_context(wrap_method(metric, "update_state", wrap_update))
            for name in ("result", "reset_state"):
                stack.enter_context(wrap_method(metric, name, functools.partial(make_refusal, metric, name)))
        yield


def make_refusal(metric: keras.metrics.Metric, name: str, _: Method) -> Callable[..., NoReturn]:
    """Build a function that refuses this method of a metric. It is called in the method's place."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"Replica code calls {metric.name}.{name}(), but a replica knows of its own rows alone. Update metrics in replica code, and "
            f"write {metric.name}.{name}() after strategy.run."
        )

    return refuse
