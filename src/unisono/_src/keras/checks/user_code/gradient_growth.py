"""Gradients that user code has made or changed itself.

Do the replicas' gradients add up to the gradients of all rows? The gradients of `value_and_grad` add up. A norm, a bound or a
quotient that the code takes of a replica's gradients does not. A mean over a replica's rows, and terms that do not depend on
rows, add up where the code divides them by the number of replicas.
"""

from __future__ import annotations

import enum
import math
import warnings

import numpy as np
from jax.extend import core

from unisono._src.keras.checks.user_code.jaxpr import walk_equations
from unisono._src.keras.checks.user_code.loss_growth import TwoTraces
from unisono._src.programs.operands import list_variables


class GradientFault(enum.Enum):
    """Why replicas' gradients do not add up to those of all rows."""

    APART = (
        "those of replicas do not add up to those of all their rows: a norm, a bound (clipping) or a quotient of one replica's gradients is not "
        "that of the whole batch. Let the optimizer clip: keras.optimizers.Adam(global_clipnorm=1.0) clips the summed gradient"
    )
    MEANS = (
        "they stay the same where a replica's rows are taken twice, as those of a mean over them do: strategy.run adds up what {replicas} replicas "
        "apply, {replicas} times the mean over the global batch"
    )
    CONSTANT = (
        "a part of them does not depend on the rows, as a weight decay: it is added in each of {replicas} replicas, and counts {replicas} times. "
        "Let the optimizer do it: keras.optimizers.AdamW(weight_decay=...), or divide it by strategy.num_replicas_in_sync"
    )


def find_gradient_fault(both: TwoTraces, replicas: int) -> GradientFault | None:
    """Find why gradients that the code makes do not add up. None where no reason shows.

    Where the code multiplies or divides by the number of replicas, it is taken to divide gradients by it.
    """
    traced = both.on_both
    given = set(traced.list_noted("derivatives"))
    growths = [both.growth.of(gradient) for gradient in traced.list_noted("gradients") if gradient not in given]
    if not all(growth.adds_up for growth in growths):
        return GradientFault.APART
    if not growths or has_number(traced.program, replicas):
        return None
    if any(growth.is_merged and growth.power == 0 and not growth.has_constant for growth in growths):
        return GradientFault.MEANS
    return GradientFault.CONSTANT if any(growth.has_constant for growth in growths) else None


def has_number(program: core.ClosedJaxpr, number: int) -> bool:
    """Whether a jaxpr multiplies or divides by a number."""
    factors = (
        float(atom.val)
        for equation in walk_equations(program)
        if equation.primitive.name in ("mul", "div")
        for atom in equation.invars
        if isinstance(atom, core.Literal) and np.shape(atom.val) == () and len(list_variables(equation.invars)) == 1
    )
    return any(math.isclose(factor, each, rel_tol=1e-4) for factor in factors for each in (number, 1 / number))


def warn_of_gradients(name: str, fault: GradientFault, replicas: int) -> None:
    """Warn that applied gradients are not those of the global batch. The function is named, and the reason."""
    warnings.warn(
        f"The function {name!r} applies gradients that it has made or changed by itself, and {fault.value.format(replicas=replicas)}. "
        f"Give the optimizer what un.value_and_grad returns. If each replica is meant to change its own, or the batch to be one, write "
        f"replicas=1.",
        stacklevel=2,
    )
