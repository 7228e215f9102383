"""Matmuls and convolutions.

One that contracts rows is a merge, as the gradient of a weight.
"""

from __future__ import annotations

from unisono._src.engine.phases.kinds import Merge, Outcomes
from unisono._src.engine.phases.rules.rule import Layouts, Rule
from unisono._src.engine.phases.twins import Equation


def multiply(equation: Equation, layouts: Layouts) -> Outcomes:
    (left_contracted, right_contracted), (left_batch, right_batch) = equation.whole.params["dimension_numbers"]
    left, right = layouts[:2]
    if left and right:
        if left.axis in left_batch and right.axis == right_batch[left_batch.index(left.axis)] and left.matches(right):
            return [left.at(left_batch.index(left.axis))]
        if left.axis in left_contracted and right.axis == right_contracted[left_contracted.index(left.axis)]:
            return [Merge()] if left.matches(right) else None
        return None
    left_free = list_free_axes(len(equation.shape(0)), left_contracted, left_batch)
    if left:
        return [left.at(len(left_batch) + left_free.index(left.axis))] if left.axis in left_free else None
    assert right is not None  # an operand has rows
    right_free = list_free_axes(len(equation.shape(1)), right_contracted, right_batch)
    if right.axis not in right_free:
        return None
    return [right.at(len(left_batch) + len(left_free) + right_free.index(right.axis))]


def list_free_axes(rank: int, contracted: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    """List an operand's axes that are neither contracted nor batch axes."""
    return [axis for axis in range(rank) if axis not in contracted and axis not in batch]


def convolve(equation: Equation, layouts: Layouts) -> Outcomes:
    """Keep rows as the batch, or merge those that are summed over.

    In the gradient by the kernel, they lie in the features' place.
    """
    params = equation.whole.params
    numbers = params["dimension_numbers"]
    left, right = layouts
    if left and not right:
        is_batch = left.axis == numbers.lhs_spec[0] and params["batch_group_count"] == 1
        return [left.at(numbers.out_spec[0])] if is_batch else None
    if left and right:
        are_features = (
            left.axis == numbers.lhs_spec[1] and right.axis == numbers.rhs_spec[1] and params["feature_group_count"] == 1
        )
        return [Merge()] if are_features and left.matches(right) else None
    return None


RULES: dict[str, Rule] = {"dot_general": multiply, "conv_general_dilated": convolve}
