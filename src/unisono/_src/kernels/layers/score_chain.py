"""Match the equations of attention between its two matmuls.

The first multiplies queries with keys, the second weights with values. In between, a score is scaled, gets a bias, and is
replaced where a mask is false. Then comes the softmax over the keys; then some weights are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import JaxprEqn, Literal

from unisono._src.kernels.layers.views import View, find_maker, read_constant, skip_arrangement
from unisono._src.programs.equations import Producers
from unisono._src.programs.operands import get_dtype, get_shape


class NoAttentionError(Exception):
    """Why a jaxpr is no attention that the kernel computes."""


class Mask(NamedTuple):
    """A boolean array."""

    view: View
    is_inverted: bool = False


class Scores(NamedTuple):
    """The scores, as the softmax gets them."""

    product: JaxprEqn
    labels: View
    """The labels of the matmul's dimensions."""
    scale: float
    bias: View | None
    masks: list[Mask]
    fill: float
    adds_fill: bool


class Weights(NamedTuple):
    """The weights, as the matmul with the values gets them."""

    scores: View
    kept: list[Mask]
    factor: float


def read_weights(view: View, key: int, made_by: Producers) -> Weights:
    """Match the equations from scores to weights. `key` labels the dimension of keys."""
    kept: list[Mask] = []
    factor = 1.0
    while True:
        view = skip_arrangement(view, made_by)
        eqn = find_maker(view, made_by)
        name = None if eqn is None else eqn.primitive.name
        if eqn is None or name not in ("select_n", "mul", "div"):
            raise NoAttentionError
        if name == "select_n":
            mask, view, number = read_selection(view, eqn, made_by)
            if number != 0:
                raise NoAttentionError
            kept.append(mask)
        elif (number := read_constant(eqn.invars[1], made_by)) is not None:
            factor = factor * number if name == "mul" else factor / number
            view = view.rename(eqn.invars[0])
        elif name == "div":
            return Weights(read_softmax(view, eqn, key, made_by), kept, factor)
        else:
            raise NoAttentionError


def read_selection(view: View, eqn: JaxprEqn, made_by: Producers) -> tuple[Mask, View, float]:
    """Match a selection between an array and a number."""
    if len(eqn.invars) != 3:
        raise NoAttentionError
    condition, if_false, if_true = eqn.invars
    for number, array, is_inverted in ((if_false, if_true, False), (if_true, if_false, True)):
        value = read_constant(number, made_by)
        if value is not None:
            return read_mask(view.rename(condition), is_inverted, made_by), view.rename(array), value
    raise NoAttentionError


def read_mask(view: View, is_inverted: bool, made_by: Producers) -> Mask:
    view = skip_arrangement(view, made_by)
    if isinstance(view.atom, Literal) or get_dtype(view.atom) != "bool":
        raise NoAttentionError
    return Mask(view, is_inverted)


def read_softmax(view: View, division: JaxprEqn, key: int, made_by: Producers) -> View:
    """Match `exp(score - largest) / sum`, and give the scores."""
    exponentials = skip_arrangement(view.rename(division.invars[0]), made_by)
    check_reduction(exponentials, skip_arrangement(view.rename(division.invars[1]), made_by), "reduce_sum", key, made_by)
    difference_view = exponentials.rename(expect_primitive(exponentials, "exp", made_by).invars[0])
    difference = expect_primitive(difference_view, "sub", made_by)
    scores = difference_view.rename(difference.invars[0])
    largest = skip_arrangement(difference_view.rename(difference.invars[1]), made_by)
    if is_made_by(largest, "stop_gradient", made_by):
        largest = skip_arrangement(largest.rename(expect_primitive(largest, "stop_gradient", made_by).invars[0]), made_by)
    if is_made_by(largest, "max", made_by):
        start, other = expect_primitive(largest, "max", made_by).invars
        if read_constant(start, made_by) != float("-inf"):
            raise NoAttentionError
        largest = skip_arrangement(largest.rename(other), made_by)
    check_reduction(scores, largest, "reduce_max", key, made_by)
    return scores


def is_made_by(view: View, name: str, made_by: Producers) -> bool:
    eqn = find_maker(view, made_by)
    return eqn is not None and eqn.primitive.name == name


def expect_primitive(view: View, name: str, made_by: Producers) -> JaxprEqn:
    """The equation that made an array, which must be of this primitive."""
    eqn = find_maker(view, made_by)
    if eqn is None or eqn.primitive.name != name:
        raise NoAttentionError
    return eqn


def check_reduction(view: View, result: View, name: str, key: int, made_by: Producers) -> None:
    """Raise `NoAttentionError` unless `result` reduces `view` over the keys alone."""
    eqn = expect_primitive(result, name, made_by)
    (operand,) = eqn.invars
    left = iter(result.labels)
    reduced = [key if size > 1 else None for size in (get_shape(operand)[axis] for axis in eqn.params["axes"])]
    labels = [None if axis in eqn.params["axes"] else next(left) for axis in range(len(get_shape(operand)))]
    for axis, label in zip(eqn.params["axes"], reduced, strict=True):
        labels[axis] = label
    is_same = skip_arrangement(View(operand, tuple(labels)), made_by) == skip_arrangement(view, made_by)
    if reduced.count(key) != 1 or not is_same:
        raise NoAttentionError


def read_scores(view: View, made_by: Producers) -> Scores:
    """Match the equations from the first matmul to the scores."""
    scale = 1.0
    bias: View | None = None
    masks: list[Mask] = []
    fill: tuple[float, bool] | None = None
    while True:
        view = skip_arrangement(view, made_by)
        eqn = find_maker(view, made_by)
        name = None if eqn is None else eqn.primitive.name
        if eqn is None:
            raise NoAttentionError
        if name == "dot_general":
            break
        is_scaled = scale != 1.0
        if name == "select_n" and (chosen := read_constant(eqn.invars[0], made_by)) is not None:  # a mask that is true for all
            view = view.rename(eqn.invars[1 + int(chosen)])
        elif name == "select_n" and not is_scaled and bias is None:
            mask, view, number, adds = read_masked(view, eqn, made_by)
            if fill not in (None, (number, adds)) or (adds and masks):
                raise NoAttentionError
            fill = number, adds
            masks.append(mask)
        elif name in ("mul", "div") and (number := read_constant(eqn.invars[1], made_by)) is not None:
            scale = scale * number if name == "mul" else scale / number
            view = view.rename(eqn.invars[0])
        elif name == "mul" and (number := read_constant(eqn.invars[0], made_by)) is not None:
            scale *= number
            view = view.rename(eqn.invars[1])
        elif name == "add" and bias is None and not is_scaled:
            view, bias = read_added_bias(view, eqn, made_by)
        else:
            raise NoAttentionError
    number, adds = fill or (0.0, False)
    return Scores(eqn, view, scale, bias, masks, number, adds)


def read_masked(view: View, eqn: JaxprEqn, made_by: Producers) -> tuple[Mask, View, float, bool]:
    """Match a masked score: mask, score, number, and whether it is added. Otherwise the number replaces the score."""
    try:
        return *read_selection(view, eqn, made_by), False
    except NoAttentionError:
        condition, if_false, if_true = eqn.invars
    for changed, score, is_inverted in ((if_false, if_true, False), (if_true, if_false, True)):
        change = made_by.find(changed)
        if change is not None and change.primitive.name in ("add", "sub") and change.invars[0] is score:
            number = read_constant(change.invars[1], made_by)
            if number is not None:
                sign = 1.0 if change.primitive.name == "add" else -1.0
                return read_mask(view.rename(condition), is_inverted, made_by), view.rename(score), sign * number, True
    raise NoAttentionError


def read_added_bias(view: View, eqn: JaxprEqn, made_by: Producers) -> tuple[View, View]:
    """Match the sum of a matmul and a bias."""
    for score, bias in (eqn.invars, eqn.invars[::-1]):
        if get_shape(score) == get_shape(eqn.outvars[0]) and leads_to_product(view.rename(score), made_by):
            return view.rename(score), skip_arrangement(view.rename(bias), made_by)
    raise NoAttentionError


def leads_to_product(view: View, made_by: Producers) -> bool:
    """Whether an array is a matmul, but for its scale."""
    while True:
        view = skip_arrangement(view, made_by)
        eqn = find_maker(view, made_by)
        if eqn is None or eqn.primitive.name not in ("mul", "div", "dot_general"):
            return False
        if eqn.primitive.name == "dot_general":
            return True
        is_first = read_constant(eqn.invars[1], made_by) is not None
        view = view.rename(eqn.invars[0] if is_first else eqn.invars[1])


def split_masks(masks: list[Mask], most: int, made_by: Producers) -> list[Mask]:
    """Split masks into smaller ones that must all be true.

    Masks that would be too many stay whole; `NoAttentionError` if these are too many.
    """
    split = [part for mask in masks for part in split_mask(mask, made_by)]
    if len(split) <= most:
        return split
    if len(masks) > most:
        raise NoAttentionError
    return masks


def split_mask(mask: Mask, made_by: Producers) -> list[Mask]:
    """Split a mask into the masks of its conjunction."""
    view = skip_arrangement(mask.view, made_by)
    eqn = find_maker(view, made_by)
    if eqn is not None and eqn.primitive.name == "not":
        return split_mask(Mask(view.rename(eqn.invars[0]), not mask.is_inverted), made_by)
    if eqn is None or eqn.primitive.name != "and" or mask.is_inverted:
        return [Mask(view, mask.is_inverted)]
    parts = [part for part in eqn.invars if read_constant(part, made_by) != 1.0]
    return [mask for part in parts for mask in split_mask(Mask(view.rename(part)), made_by)]
