"""Errors of JAX, with a first line in our words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import keras

from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.keras.private.optimizers import is_like_setting, list_dead_settings
from unisono._src.keras.private.trace_failures import find_failed_layer, find_first_error
from unisono._src.placement import split_evenly
from unisono._src.typing import PyTree


def check_optimizer_attributes(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse attributes that older programs set, and that do nothing."""
    dead = list_dead_settings(optimizer)
    if not dead:
        return
    write = "Write optimizer.learning_rate = ..." if "lr" in dead[0] else "Delete the line, or give the attribute another name."
    raise AttributeError(
        f"optimizer.{dead[0]} was set, but {type(optimizer).__name__} has no such attribute: the line does nothing in Keras 3, and "
        f"training would go on as before. {write}"
    )


@contextlib.contextmanager
def explain_read_attributes() -> Iterator[None]:
    """Explain in a note what to write instead. It is for reads of such an attribute in the block."""
    try:
        yield
    except AttributeError as error:
        if isinstance(error.obj, keras.optimizers.Optimizer) and is_like_setting(error.name or "", ["learning_rate"]):
            write = (
                "a schedule of keras.optimizers.schedules"
                if error.name == "decay"
                else "optimizer.learning_rate, and float() for a number"
            )
            note = f"{type(error.obj).__name__} has no attribute {error.name!r} in Keras 3. Write {write}."
            if note not in getattr(error, "__notes__", []):  # a callback of fit in a scope is in two blocks
                error.add_note(note)
        raise


UNBOUND_AXIS = "Found an unbound axis name"
"""The beginning of JAX's message about a collective without devices."""
USES_COLLECTIVE = "uses a collective over an axis, but replicas of one device run one after another: they have nobody to talk to."
VARIABLE_IN_TRACE = "You are attempting to create a variable while in a stateless scope"
"""The beginning of Keras' message about a variable that is made in what is compiled."""


CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    IndexError,
)
"""Errors of JAX where a trace needs the value of a traced array; an IndexError where the array is a position or a mask."""


def is_concretization_error(error: BaseException) -> bool:
    """Whether tracing failed because code needs an array's value."""
    cause = find_first_error(error)
    return isinstance(cause, CONCRETIZATION_ERRORS) and is_raised_by_jax(cause)


TRACE_ERRORS = (TypeError, ValueError, IndexError, jax.errors.JAXTypeError, jax.errors.JaxRuntimeError)
"""Errors of JAX where something cannot be traced, compiled or run."""


class StepError(ValueError):
    """A step could not be traced, compiled or run. The cause says more."""


@contextlib.contextmanager
def explain_step_errors(model: keras.Model, batch: GlobalBatch | PyTree, replicas: int, eager: bool = False) -> Iterator[None]:
    """Put the model and the shapes in front of what JAX raises. Errors of Keras and of the user's code pass as they are.

    `eager`: whether the step is not compiled.
    """
    try:
        yield
    except Exception as error:
        refuse_axis_of_model(model, error)
        if not eager:
            refuse_uncompilable_layer(error)
        if 1 in list_shard_sizes(batch, replicas):
            error.add_note(
                f"A replica has one row of {describe_batch(batch, replicas)}. Where code removes all axes of length one, as ops.squeeze(x) does, "
                f"it removes the axis of the rows there. Name the axis: ops.squeeze(x, axis=1)."
            )
        if not (isinstance(error, TRACE_ERRORS) and is_raised_by_jax(error)):
            raise
        raise StepError(
            f"A step of the model {model.name!r} could not run on {describe_batch(batch, replicas)}. Check that the shapes and dtypes fit the "
            f"model, its loss and its metrics, and that call() uses keras.ops on traced values. JAX says: {take_first_line(error)}"
        ) from error


def describe_batch(batch: GlobalBatch | PyTree, replicas: int) -> str:
    """Describe the shapes of a batch, and a replica's rows."""
    if batch is None:
        return "the first batch"
    shapes = jax.tree.map(lambda leaf: tuple(leaf.shape), read_shapes(batch), is_leaf=has_shape)
    sizes = list_shard_sizes(batch, replicas)
    if not sizes:
        return f"a batch of shapes {shapes}"
    return f"a batch of shapes {shapes}, of which each of {replicas} replicas gets {' or '.join(map(str, sizes))} rows"


def list_shard_sizes(batch: GlobalBatch | PyTree, replicas: int) -> list[int]:
    """List the different row counts of a batch's shards. Empty where one replica has all rows, or the batch is not known."""
    leaves = [] if batch is None else jax.tree.leaves(read_shapes(batch), is_leaf=has_shape)
    first = next((leaf.shape for leaf in leaves if has_shape(leaf) and leaf.shape), ())
    if replicas == 1 or not first:
        return []
    return list(dict.fromkeys(len(shard) for shard in split_evenly(first[0], replicas) if shard))


def read_shapes(batch: GlobalBatch | PyTree) -> PyTree:
    """Read the tree of a batch, whose leaves have shapes."""
    if not isinstance(batch, GlobalBatch):
        return batch
    return batch.tree() if batch.is_whole else batch.shapes(batch.rows)


def has_shape(leaf: object) -> bool:
    return hasattr(leaf, "shape")


def join_own_notes(error: Exception) -> str:
    """Join the notes that Unisono has added to an error."""
    notes: list[str] = getattr(error, "__notes__", [])
    return "".join(f"\n\n{note}" for note in notes if note.startswith("The function"))


@contextlib.contextmanager
def explain_function_errors(name: str, batch: GlobalBatch | None = None, eager: bool = False) -> Iterator[None]:
    """Put a function's name in front of what JAX raises. Where replicas run it on a batch, the shapes of the batch are added."""
    try:
        with explain_read_attributes():
            yield
    except Exception as error:
        if batch is not None:
            refuse_unbound_axis(name, error)
        refuse_variable_in_trace(name, error)
        if not eager:
            refuse_uncompilable_layer(error)
        if not (isinstance(error, (AttributeError, *TRACE_ERRORS)) and is_raised_by_jax(error)):
            raise
        rows = "" if batch is None else f"run on the replicas of a global batch of shapes {[leaf.shape for leaf in batch.leaves]}"
        raise StepError(
            f"The function {name!r} could not {rows or 'be compiled'}. Check that it uses keras.ops on traced values, and neither float(), "
            f".numpy() nor if on them. JAX says: {take_first_line(error)}{join_own_notes(error)}"
        ) from error


def is_unbound_axis(error: BaseException) -> bool:
    """Whether code uses a collective over an axis that is not there. `jax.lax.psum` is one."""
    cause = find_first_error(error)
    return isinstance(cause, NameError) and str(cause).startswith(UNBOUND_AXIS)


def refuse_axis_of_model(model: keras.Model, error: BaseException) -> None:
    """Refuse a collective in a model's step."""
    if is_unbound_axis(error):
        failure = find_failed_layer(error)
        where = f"layer {failure.layer.name!r} of the model {model.name!r}" if failure else f"step of the model {model.name!r}"
        raise ValueError(
            f"The {where} {USES_COLLECTIVE} "
            f"Under a strategy a layer computes from the rows of its replica, and the strategy adds up gradients and metrics: leave the "
            f"collective out. For what must see the whole batch, write replicas=1."
        ) from error


def refuse_unbound_axis(name: str, error: BaseException) -> None:
    """Refuse a collective in replica code."""
    if is_unbound_axis(error):
        raise ValueError(
            f"The function {name!r} {USES_COLLECTIVE} Return the value, and add over replicas after strategy.run, by "
            f'strategy.reduce("SUM", value, axis=None).'
        ) from error


def refuse_uncompilable_layer(error: BaseException) -> None:
    """Refuse a layer that cannot be compiled, by its name. Its trace needs the value of an array, or the layer says so itself."""
    layer, cause = find_failed_layer(error) or (None, error)
    if layer is None or (layer.supports_jit and not is_concretization_error(cause)):
        return
    raise StepError(
        f"The layer {layer.name!r} ({type(layer).__name__}) cannot be compiled, and the steps of a strategy always are: "
        f"{take_first_line(cause).removesuffix('.')}. Move it into the data pipeline, for example dataset.map(layer); if it is a layer of your own, "
        f"use keras.ops in its call(), and neither NumPy, float() nor if on traced values. To run it as it is, slowly, write "
        f"compile(..., run_eagerly=True)."
    ) from cause


def refuse_variable_in_trace(name: str, error: BaseException) -> None:
    """Refuse to make a variable in what is compiled. Keras makes none there."""
    if str(error).startswith(VARIABLE_IN_TRACE):
        raise ValueError(
            f"The function {name!r} makes a variable where it is compiled, whose value would be lost. Make layers, metrics and variables "
            f"once, outside of it and inside strategy.scope() if there is one; a layer of your own makes its variables in __init__ or in "
            f"build(input_shape), not in call."
        ) from error


def is_raised_by_jax(error: BaseException) -> bool:
    """Whether an error comes from JAX. Its class says so, or the innermost frame that it left."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = "" if frames is None else frames.tb_frame.f_globals.get("__name__", "")
    if isinstance(error, AttributeError):
        return "Tracer has no attribute" in str(error)  # JAX takes its own frames away
    return isinstance(error, (jax.errors.JAXTypeError, jax.errors.JaxRuntimeError)) or module.partition(".")[0] == "jax"


def take_first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
