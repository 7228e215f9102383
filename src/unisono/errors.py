"""A first line in our words before what JAX says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


class StepError(ValueError):
    """A step could not be traced, compiled or run; the cause says more."""


@contextlib.contextmanager
def explained(model: Any, batch: Any) -> Iterator[None]:
    """Puts the model and the shapes in front of an error of JAX. Errors of Keras and of the user's code that say what they
    received pass as they are."""
    try:
        yield
    except (TypeError, jax.errors.JAXTypeError, jax.errors.JaxRuntimeError) as error:
        shapes = jax.tree.map(lambda leaf: tuple(leaf.shape), batch, is_leaf=lambda leaf: hasattr(leaf, "shape"))
        what = f"a batch of shapes {shapes}" if batch is not None else "the first batch"
        raise StepError(
            f"A step of the model {model.name!r} could not run on {what}. Check that the shapes and dtypes fit the model and its "
            f"loss, and that call() uses keras.ops on traced values. JAX says: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
