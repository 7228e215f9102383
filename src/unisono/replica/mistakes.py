"""Lines of replica code that would train something else in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from unisono import keras_seam

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Code(Protocol):
    """What the replica's code has done so far."""

    rows: Any
    replicas: int
    shares: list[Any]


def calls(code: Code) -> dict[str, Callable[[Any], Any]]:
    """What calls of Keras do in replica code."""
    return {
        "loss": lambda stock: lambda loss, *args, **kwargs: loss_called(code, stock, loss, *args, **kwargs),
        "mean": lambda stock: lambda metric, values, *args, **kwargs: mean_fed(code, stock, metric, values, *args, **kwargs),
        "metric": lambda _: lambda metric, *args, **kwargs: metric.update_state(*args, **kwargs),
    }


def loss_called(code: Code, stock: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """A mean over a replica's rows is refused; one value for each row keeps the mask, by which they are counted."""
    if loss.reduction in MEANS:
        raise ValueError(
            f"The loss {loss.name!r} has reduction={loss.reduction!r} and is called in replica code: it would divide by the {code.rows} "
            f"rows of a replica, and the gradients of {code.replicas} replicas, which are summed, would be {code.replicas} times too "
            f"large. Make it with reduction=None, and let the engine divide by the rows of the global batch:\n\n"
            f"    loss_fn = keras.losses.{type(loss).__name__}(reduction=None)\n"
            f"    value, gradients = un.value_and_grad(lambda: loss_fn(y, model(x, training=True)), model.trainable_variables)"
        )
    mask = keras_seam.get_keras_mask(y_pred)
    values = stock(loss, y_true, y_pred, sample_weight)
    if mask is not None and mask.shape == values.shape:
        keras_seam.set_keras_mask(values, mask)
    return values


def mean_fed(code: Code, stock: Any, metric: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    if any(values is share for share in code.shares):
        raise ValueError(
            f"The metric {metric.name!r} is a mean, and is fed with a replica's share of the loss, which is divided by the rows of the "
            f"global batch already: over {code.replicas} replicas it would say about 1/{code.replicas} of the loss (1.75 for a loss of "
            f"3.5 and two replicas). Feed it with one value for each example, or outside of replica code:\n\n"
            f'    loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)\n    {metric.name}.update_state(loss)'
        )
    return stock(metric, values, *args, **kwargs)


@contextlib.contextmanager
def unreadable(metrics: Sequence[Any]) -> Iterator[None]:
    """For the block, what metrics say cannot be asked: a replica knows its own rows alone."""
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            for name in ("result", "reset_state"):
                stack.enter_context(keras_seam.wrapped_method(metric, name, lambda _, m=metric, n=name: refusing(m, n)))
        yield


def refusing(metric: Any, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"Replica code calls {metric.name}.{name}(), but a replica knows of its own rows alone. Update metrics in replica code, and "
            f"write {metric.name}.{name}() after strategy.run."
        )

    return refuse
