"""`value_and_grad`: a function's loss and its gradients.

It works in replica code and outside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import keras
from keras import ops

from unisono._src.keras.private.compiled_losses import get_keras_mask, reduce_weighted_values
from unisono._src.keras.private.trainer_state import RecordingScope, find_stateless_scope
from unisono._src.keras.replica.optimizer_update import GradientNotes
from unisono._src.keras.replica.trace_recorder import ReplicaCode, get_current_code
from unisono._src.keras.steps.loss_inputs import compute_mean_divisor, spread_weights
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.near_names import says_near_names
from unisono._src.typing import AnyArray, Array, KerasObject, PyTree, Values


class GivenLoss(NamedTuple):
    """What `fn` returned as its loss."""

    values: Array
    weights: Array | None
    has_rows: bool
    """Whether there is a value for each example. Else their number does not depend on the rows, and their sum is the loss."""


class GradientScope(RecordingScope):
    """Some variables at other values, inside an outer scope."""

    def __init__(self, outer: keras.StatelessScope | None, state_mapping: list[tuple[keras.Variable, AnyArray]]) -> None:
        super().__init__(state_mapping=state_mapping, collect_losses=True)
        self._outer = outer

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        value = super().get_current_value(variable)
        return self._outer.get_current_value(variable) if value is None and self._outer is not None else value


@overload
def value_and_grad(
    fn: Callable[[], PyTree], variables: Iterable[keras.Variable], has_aux: Literal[False] = False
) -> tuple[Array, list[Array]]: ...


@overload
def value_and_grad(
    fn: Callable[[], tuple[PyTree, PyTree]], variables: Iterable[keras.Variable], has_aux: Literal[True]
) -> tuple[tuple[Array, PyTree], list[Array]]: ...


@says_near_names
def value_and_grad(
    fn: Callable[[], PyTree], variables: Iterable[keras.Variable], has_aux: bool = False
) -> tuple[Array | tuple[Array, PyTree], list[Array]]:
    """Call `fn` now, and return its loss and the loss's gradients.

    What `fn` changes (moving statistics, metrics, random state) stays changed. In replica code the loss is best left to the
    engine: `fn` returns one value for each example, and the loss is then this replica's share of the mean over the global batch.

    Args:
        fn: Returns one of: a value for each example, and their mean is taken; (values, weights), and the weighted mean is taken;
            a number, which is taken as it is; an array whose length does not depend on the rows, and its sum is taken. With
            `has_aux` it returns (one of these, anything else).
        variables: The Keras variables, for example `model.trainable_variables`.
        has_aux: Whether `fn` returns something beside the loss.

    Returns:
        (value, gradients), or ((value, anything else), gradients) with `has_aux`.
    """
    variables = list_gradient_variables(variables)
    code = get_current_code()
    outer = find_stateless_scope()
    scaler = None if code is None else code.find_scaler(variables)
    notes = GradientNotes(code)
    assigned: list[keras.Variable] = []

    def scaled_loss(values: Values) -> tuple[Array, PyTree]:
        scope = GradientScope(outer, list(zip(variables, values, strict=True)))
        with scope, contextlib.nullcontext() if code is None else code.trace_gradients():
            returned, aux = split_returned(fn(), has_aux)
            given = read_loss(code, returned)
            note_loss(code, given)
        loss = compute_loss_share(given, code, notes.masks)
        assigned[:] = scope.assigned.values()
        left = [scope.state_mapping[id(v)] for v in assigned]
        return scale_loss(loss, scaler, code), (loss, aux, left, notes.get_arrays())

    differentiate = jax.grad(rewrite_before_gradient(scaled_loss), has_aux=True)
    gradients, (loss, aux, left, arrays) = differentiate([v.value for v in variables])
    for variable, value in zip(assigned, left, strict=True):
        variable.assign(value) if outer is None else outer.add_update((variable, value))
    notes.set_arrays(arrays)
    if code is not None:
        if scaler is not None and not code.scaled_by_user:
            gradients = unscale_gradients(gradients, scaler, code)
        code.note_gradients(gradients)
        if notes.has_divided:
            code.note("share", loss, origin="all that was added up")
    return ((loss, aux) if has_aux else loss), gradients


def scale_loss(loss: Array, scaler: keras.optimizers.LossScaleOptimizer | None, code: ReplicaCode | None) -> Array:
    """Scale the loss as the optimizer does. Where user code has scaled it, it stays as it is."""
    if scaler is None or code is None or code.scaled_by_user:
        return loss
    code.scales = True
    try:
        return scaler.scale_loss(loss)
    finally:
        code.scales = False


def unscale_gradients(gradients: list[Array], scaler: keras.optimizers.LossScaleOptimizer, code: ReplicaCode) -> list[Array]:
    """Remove the loss scale from gradients. The optimizer, which removes the scale itself, gets the scaled gradients."""
    scale = scaler.dynamic_scale.value
    without_scale = []
    for gradient in gradients:
        without_scale.append(gradient / scale)
        code.keep_scaled_gradient(scaler, without_scale[-1], gradient)
    return without_scale


def read_loss(code: ReplicaCode | None, returned: PyTree) -> GivenLoss:
    """Read the loss that `fn` returned. The axis of one row is put back."""
    values, weights = returned if isinstance(returned, tuple) else (returned, None)
    if code is None or not hasattr(values, "dtype"):
        return GivenLoss(values, weights, has_rows=ops.ndim(values) > 0)
    rows = code.axes.find_rows(values, need_rows=weights is not None)
    return GivenLoss(values, weights, False) if rows is None else GivenLoss(rows, weights, True)


def note_loss(code: ReplicaCode | None, loss: GivenLoss) -> None:
    """Note a loss in replica code. The code has scaled it by itself, or it is losses of examples, which the engine divides."""
    if code is None:
        return
    if loss.weights is not None:
        code.note("vector", loss.values, origin="weighted")
        code.note("weights", loss.weights)
    elif not loss.has_rows and hasattr(loss.values, "dtype"):
        code.note("loss", loss.values)
    else:
        code.note("vector", loss.values)


BESIDE_LOSS = "If the second is no weight, write has_aux=True."


def compute_loss_share(loss: GivenLoss, code: ReplicaCode | None, masks: list[Array]) -> Array:
    """Compute the loss, or this replica's share of the mean.

    It is one number in float32. `masks` are the masks of the losses in it.
    """
    values, weights, has_rows = loss
    if not has_rows:
        if weights is not None:
            raise ValueError(
                f"fn returned (loss, weights), but its loss is one number. Return one value for each example. {BESIDE_LOSS}"
            )
        number = ops.cast(values, "float32")
        return ops.sum(number) if ops.ndim(number) else number
    if weights is not None:
        try:
            weights = spread_weights(values, weights)
        except ValueError as error:
            raise ValueError(f"fn returned two arrays, which are taken for (values, weights): {error} {BESIDE_LOSS}") from None
    mask = find_mask(values, masks)
    numerator: KerasObject = reduce_weighted_values(values, weights, mask, reduction="sum", dtype=values.dtype)
    divisor = compute_mean_divisor(values, weights, mask)
    mean = ops.divide_no_nan(numerator, divisor) if code is None else code.divided(numerator, divisor)
    return ops.cast(mean, "float32")


def find_mask(values: Array, masks: list[Array]) -> Array | None:
    """Find the only mask that fits the values, or Keras' own."""
    fitting = list({id(mask): mask for mask in masks if mask.shape == values.shape}.values())
    if len(fitting) > 1:
        raise ValueError(
            f"fn calls losses with {len(fitting)} different masks, and returns values of which nobody can say by which mask they are to be "
            f"counted. Return (values, weights), with the weight 0 where nothing counts."
        )
    return fitting[0] if fitting else get_keras_mask(values)


def split_returned(returned: PyTree, has_aux: bool) -> tuple[PyTree, PyTree]:
    """Split what `fn` returned into (loss, anything else). What is no loss is refused."""
    if not has_aux:
        loss = returned
        aux = None
    elif isinstance(returned, tuple) and len(returned) == 2:
        loss, aux = returned
    else:
        raise ValueError(f"fn returned {type(returned).__name__}, but with has_aux=True it must return (loss, anything else).")
    parts = loss if isinstance(loss, tuple) else (loss,)
    if len(parts) > 2 or not all(hasattr(part, "dtype") or isinstance(part, int | float) for part in parts):
        what = "None" if loss is None else f"a {type(loss).__name__}"
        raise ValueError(
            f"fn returned {what} as its loss. Return one value for each example, (values, weights), or one number; to return "
            f"more, write has_aux=True and return (loss, the rest)."
        )
    return loss, aux


def list_gradient_variables(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """List the variables, and refuse what has no gradient."""
    if isinstance(variables, keras.Layer):
        raise TypeError(f"value_and_grad received the {type(variables).__name__} itself. Write its trainable_variables.")
    listed: list[keras.Variable] = [variables] if isinstance(variables, keras.Variable) else list(variables)
    for variable in listed:
        if not isinstance(variable, keras.Variable):
            raise TypeError(
                f"value_and_grad received {type(variable).__name__} among the variables. Give it Keras variables, for example "
                f"model.trainable_variables."
            )
        if not jnp.issubdtype(variable.dtype, jnp.floating):
            raise TypeError(
                f"value_and_grad received the variable {variable.path!r} of dtype {variable.dtype}, which has no gradient."
            )
    return listed
