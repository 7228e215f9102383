"""`value_and_grad`: the loss of a function of no arguments and its gradients, in replica code and elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import keras
from keras import ops

from unisono._src import keras_private
from unisono._src.distributed.per_replica import PerReplica, Shards
from unisono._src.near_names import says_near_names
from unisono._src.replica.losses import count_of
from unisono._src.replica.trace_recorder import ReplicaCode, current


class GradientScope(keras_private.RecordingScope):
    """Some variables at other values, over the scope outside."""

    def __init__(self, outer: Any, state_mapping: list[tuple[Any, Any]]) -> None:
        super().__init__(state_mapping=state_mapping, collect_losses=True)
        self._outer = outer

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return self._outer.get_current_value(variable) if value is None and self._outer is not None else value


@overload
def value_and_grad(fn: Callable[[], Any], variables: Iterable[Any], has_aux: Literal[False] = False) -> tuple[Any, list[Any]]: ...


@overload
def value_and_grad(
    fn: Callable[[], tuple[Any, Any]], variables: Iterable[Any], has_aux: Literal[True]
) -> tuple[tuple[Any, Any], list[Any]]: ...


@says_near_names
def value_and_grad(fn: Callable[[], Any], variables: Iterable[Any], has_aux: bool = False) -> tuple[Any, list[Any]]:
    """Calls `fn` now, and returns its loss and the gradients of the loss.

    What `fn` changes (moving statistics, metrics, random state) stays changed. In replica code the loss is best left to the
    engine: `fn` returns one value for each example, and what comes back is this replica's share of the mean over the global
    batch.

    Args:
        fn: Returns one of: a value for each example, of which the mean is taken; (values, weights), of which the weighted mean
            is taken; a number, which is taken as it is. With `has_aux`, (that, anything else).
        variables: The Keras variables, for example `model.trainable_variables`.
        has_aux: Whether `fn` returns something beside the loss.

    Returns:
        (value, gradients), or ((value, what else there was), gradients) with `has_aux`.
    """
    variables = checked(variables)
    code, outer = current(), keras_private.stateless_scope()
    start = [v.value for v in variables]
    scaler = None if code is None else next((o for v in variables if (o := code.scalers.get(id(v))) is not None), None)
    assigned: list[Any] = []
    before = Before(code)

    def loss_of(values: list[Any]) -> tuple[Any, Any]:
        scope = GradientScope(outer, list(zip(variables, values, strict=True)))
        with scope, contextlib.nullcontext() if code is None else code.differentiating():
            returned = fn()
            loss, aux = unpacked(returned, has_aux)
            if code is not None and is_one_number(loss):
                code.note("loss", loss)
            elif code is not None:
                is_weighted = isinstance(loss, tuple)
                code.note("vector", loss[0] if is_weighted else loss, of="weighted" if is_weighted else None)
        loss = share(loss, code, before.masks)
        assigned[:] = scope.assigned.values()
        left = [scope.state_mapping[id(v)] for v in assigned]
        return scaled(loss, scaler, code), (loss, aux, left, before.noted)

    gradients, (loss, aux, left, noted) = jax.grad(loss_of, has_aux=True)(start)
    for variable, value in zip(assigned, left, strict=True):
        variable.assign(value) if outer is None else outer.add_update((variable, value))
    if scaler is not None and code is not None and not code.scaled_by_user:
        gradients = unscaled(gradients, scaler, code)
    if code is not None:
        code.give_gradients(gradients)
    before.hand_on(noted)
    if code is not None and before.is_share:
        code.note("share", loss, of="all that was added up")
    return ((loss, aux) if has_aux else loss), gradients


class Before:
    """Where the replica's code stood before a function was differentiated."""

    def __init__(self, code: ReplicaCode | None) -> None:
        self._code = code
        self._divisors, self._noted, self._masks = (0, 0, 0) if code is None else self._now(code)

    @staticmethod
    def _now(code: ReplicaCode) -> tuple[int, int, int]:
        return len(code.divisors) + len(code.fixed_divisors), len(code.noted), len(code.masks)

    @property
    def masks(self) -> list[Any]:
        """Of losses called since then."""
        return [] if self._code is None else self._code.masks[self._masks :]

    @property
    def noted(self) -> list[Any]:
        """The arrays noted since then."""
        return [] if self._code is None else [noted.arrays for noted in self._code.noted[self._noted :]]

    def hand_on(self, arrays: list[Any]) -> None:
        """The same, as they are outside of what is differentiated."""
        if self._code is not None:
            since = self._code.noted[self._noted :]
            self._code.noted[self._noted :] = [n._replace(arrays=a) for n, a in zip(since, arrays, strict=True)]

    @property
    def is_share(self) -> bool:
        """Whether something was divided by the size of the global batch."""
        return self._code is not None and self._now(self._code)[0] > self._divisors


def scaled(loss: Any, scaler: Any, code: ReplicaCode | None) -> Any:
    """As the optimizer wants it, unless the user's code has done that."""
    if scaler is None or code is None or code.scaled_by_user:
        return loss
    code.scales = True
    try:
        return scaler.scale_loss(loss)
    finally:
        code.scales = False


def unscaled(gradients: list[Any], scaler: Any, code: ReplicaCode) -> list[Any]:
    """The gradients of the loss as it is. The optimizer, which takes the scale out by itself, gets those of the scaled one."""
    scale, found = scaler.dynamic_scale.value, []
    for gradient in gradients:
        found.append(gradient / scale)
        code.keep_scaled(scaler, found[-1], gradient)
    return found


def is_one_number(loss: Any) -> bool:
    return not isinstance(loss, tuple) and not ops.ndim(loss) and hasattr(loss, "dtype")


def share(loss: Any, code: ReplicaCode | None, masks: list[Any]) -> Any:
    """One number, in float32: the loss, or this replica's part of the mean. `masks` are those of the losses that it was made of."""
    values, weights = loss if isinstance(loss, tuple) else (loss, None)
    if not ops.ndim(values):
        if weights is not None:
            raise ValueError("fn returned (loss, weights), but its loss is one number. Return one value for each example.")
        return ops.cast(values, "float32")
    mask = mask_of(values, masks)
    numerator = keras_private.reduce_weighted_values(values, weights, mask, reduction="sum", dtype=values.dtype)
    divisor = count_of(values, weights, mask)
    mean = ops.divide_no_nan(numerator, divisor) if code is None else code.divided(numerator, divisor)
    return ops.cast(mean, "float32")


def mask_of(values: Any, masks: list[Any]) -> Any:
    """The one mask that fits the values."""
    fitting = list({id(mask): mask for mask in masks if mask.shape == values.shape}.values())
    if len(fitting) > 1:
        raise ValueError(
            f"fn calls losses with {len(fitting)} different masks, and returns values of which nobody can say by which mask they are to be "
            f"counted. Return (values, weights), with the weight 0 where nothing counts."
        )
    return fitting[0] if fitting else keras_private.get_keras_mask(values)


def unpacked(returned: Any, has_aux: bool) -> tuple[Any, Any]:
    """(loss, what else there was)"""
    if not has_aux:
        loss, aux = returned, None
    elif isinstance(returned, tuple) and len(returned) == 2:
        loss, aux = returned
    else:
        raise ValueError(f"fn returned {type(returned).__name__}, but with has_aux=True it must return (loss, anything else).")
    parts = loss if isinstance(loss, tuple) else (loss,)
    if len(parts) > 2 or not all(is_number(part) for part in parts):
        raise ValueError(
            f"fn returned {described(loss)} as its loss. Return one value for each example, (values, weights), or one number; to return "
            f"more, write has_aux=True and return (loss, the rest)."
        )
    return loss, aux


def is_number(part: Any) -> bool:
    return hasattr(part, "dtype") or isinstance(part, int | float)


def described(loss: Any) -> str:
    return "None" if loss is None else f"a {type(loss).__name__}"


def checked(variables: Iterable[Any]) -> list[Any]:
    if isinstance(variables, keras.Layer):
        raise TypeError(f"value_and_grad received the {type(variables).__name__} itself. Write its trainable_variables.")
    variables = [variables] if isinstance(variables, keras.Variable) else list(variables)
    for variable in variables:
        if isinstance(variable, PerReplica | Shards) or not isinstance(variable, keras.Variable):
            raise TypeError(
                f"value_and_grad received {type(variable).__name__} among the variables. Give it Keras variables, for example "
                f"model.trainable_variables."
            )
        if not jnp.issubdtype(variable.dtype, jnp.floating):
            raise TypeError(
                f"value_and_grad received the variable {variable.path!r} of dtype {variable.dtype}, which has no gradient."
            )
    return variables
