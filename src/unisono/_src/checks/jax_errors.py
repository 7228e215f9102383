"""A first line in our words before what JAX says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from unisono._src import keras_private
from unisono._src.placement import split_evenly

UNBOUND = "Found an unbound axis name"
"""How JAX begins what it says of a collective without devices."""
MADE_INSIDE = "You are attempting to create a variable while in a stateless scope"
"""How Keras begins what it says of a variable that is made in what is compiled."""


NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    IndexError,
)
"""What JAX raises where a trace needs the value of a traced array; an IndexError where it is a position or a mask."""


def needs_values(error: BaseException) -> bool:
    """Whether code could not be traced, since it asks for the value of an array."""
    cause = keras_private.first_raised(error)
    return isinstance(cause, NEEDS_VALUES) and raised_by_jax(cause)


OF_TRACES = (TypeError, ValueError, IndexError, jax.errors.JAXTypeError, jax.errors.JaxRuntimeError)
"""The kinds of errors that JAX raises where something cannot be traced, compiled or run."""


class StepError(ValueError):
    """A step could not be traced, compiled or run; the cause says more."""


@contextlib.contextmanager
def explained(model: Any, batch: Any, replicas: int, eager: bool = False) -> Iterator[None]:
    """Puts the model and the shapes in front of what JAX raises. Errors of Keras and of the user's code pass as they are.

    `eager`: whether the step is not compiled.
    """
    try:
        yield
    except Exception as error:
        if not eager:
            refuse_not_compiled(error)
        if not (isinstance(error, OF_TRACES) and raised_by_jax(error)):
            raise
        raise StepError(
            f"A step of the model {model.name!r} could not run on {described(batch, replicas)}. Check that the shapes and dtypes fit the model, its "
            f"loss and its metrics, and that call() uses keras.ops on traced values. JAX says: {first_line(error)}"
        ) from error


def described(batch: Any, replicas: int) -> str:
    """Return the shapes of a batch, and how many of its rows a replica has."""
    if batch is None:
        return "the first batch"
    has_shape = lambda leaf: hasattr(leaf, "shape")  # noqa: E731
    shapes = jax.tree.map(lambda leaf: tuple(leaf.shape), batch, is_leaf=has_shape)
    first = next((leaf.shape for leaf in jax.tree.leaves(batch, is_leaf=has_shape) if has_shape(leaf) and leaf.shape), ())
    if replicas == 1 or not first:
        return f"a batch of shapes {shapes}"
    rows = " or ".join(str(count) for count in dict.fromkeys(len(part) for part in split_evenly(first[0], replicas) if part))
    return f"a batch of shapes {shapes}, of which each of {replicas} replicas gets {rows} rows"


@contextlib.contextmanager
def explained_loop(name: str, batch: Any, eager: bool = False) -> Iterator[None]:
    """The same for a function that `run` was given."""
    try:
        yield
    except NameError as error:
        if not str(error).startswith(UNBOUND):
            raise
        raise ValueError(
            f"The function {name!r} uses a collective over an axis, but replicas of one device run one after another: they have nobody "
            f"to talk to. Return the value, and add over replicas after strategy.run, by "
            f'strategy.reduce("SUM", value, axis=None).'
        ) from error
    except Exception as error:
        refuse_made_inside(name, error)
        if not eager:
            refuse_not_compiled(error)
        if not (isinstance(error, (AttributeError, *OF_TRACES)) and raised_by_jax(error)):
            raise
        shapes = [leaf.shape for leaf in batch.leaves]
        raise StepError(
            f"The function {name!r} could not run on the replicas of a global batch of shapes {shapes}. Check that it uses keras.ops "
            f"on traced values, and neither float(), .numpy() nor if on them. JAX says: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def explained_function(name: str) -> Iterator[None]:
    """The same for a function that is compiled as a whole."""
    try:
        yield
    except Exception as error:
        refuse_made_inside(name, error)
        refuse_not_compiled(error)
        if not (isinstance(error, (AttributeError, *OF_TRACES)) and raised_by_jax(error)):
            raise
        raise StepError(
            f"The function {name!r} could not be compiled. Check that it uses keras.ops on traced values, and neither "
            f"float(), .numpy() nor if on them. JAX says: {first_line(error)}"
        ) from error


def refuse_not_compiled(error: BaseException) -> None:
    """Of a layer whose trace needs the value of an array, or that says itself that it may not be compiled: by its name."""
    failure = keras_private.failure_behind(error)
    if failure is None:
        return
    layer, cause = failure
    if layer.supports_jit and not needs_values(cause):
        return
    raise StepError(
        f"The layer {layer.name!r} ({type(layer).__name__}) cannot be compiled, and the steps of a strategy always are: "
        f"{first_line(cause).removesuffix('.')}. Move it into the data pipeline, for example dataset.map(layer); if it is a layer of your own, use "
        f"keras.ops in its call(), and neither NumPy, float() nor if on traced values. To run it as it is, slowly, write "
        f"compile(..., run_eagerly=True)."
    ) from cause


def refuse_made_inside(name: str, error: BaseException) -> None:
    """Of a variable that Keras does not make in what is compiled."""
    if str(error).startswith(MADE_INSIDE):
        raise ValueError(
            f"The function {name!r} makes a variable where it is compiled, whose value would be lost. Make layers, metrics and variables "
            f"once, outside of it and inside strategy.scope() if there is one; a layer of your own makes its variables in __init__ or in "
            f"build(input_shape), not in call."
        ) from error


def raised_by_jax(error: BaseException) -> bool:
    """Whether the error comes out of JAX: by its kind, or by the innermost frame that it left."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = "" if frames is None else frames.tb_frame.f_globals.get("__name__", "")
    if isinstance(error, AttributeError):
        return "Tracer has no attribute" in str(error)  # JAX takes its own frames away
    return isinstance(error, (jax.errors.JAXTypeError, jax.errors.JaxRuntimeError)) or module.partition(".")[0] == "jax"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
