"""Growth of the parts of a loss that replica code makes by itself: measured on a replica's rows, and on the same rows taken twice.

A sum doubles, and the sums of replicas add up to the sum of the batch. A mean stays the same; so does its gradient, which the engine adds up
over R replicas. A divisor that is the same in both programs is no number of rows: this tells the divisor R from the divisor of a mean over R rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.extend import core

from unisono._src.checks.user_code.jaxpr import Atom, has_random_draws
from unisono._src.checks.user_code.provenance import CLOSE, LossTerm, NumberArgument, Provenance, Scaling
from unisono._src.replica.growth import ENOUGH_ROWS, ROUGH, compute_growth_ratio
from unisono._src.replica.probe_rows import draw_values_like
from unisono._src.replica.variable_discovery import Trace
from unisono._src.typing import AnyArray, Array

Divisor = TypeVar("Divisor", bound=float | NumberArgument)

AtomValues: TypeAlias = Mapping[Atom, AnyArray | np.generic]
"""Values of inputs and variables of a program."""

MEAN = 1.0
SUM = 2.0
"""How many times as large a mean and a sum are for twice as many rows."""

EXACT = 0.02
"""The largest distance of a ratio from 1 or 2: half precision rounds long sums."""


class LossPart(NamedTuple):
    """A part of a loss."""

    growth: float | None
    """1 for a mean over the rows, 2 for a sum; None where it could not be measured."""
    path: Scaling
    """The constants that it is divided by, whatever the number of rows."""
    of_rows: bool


@dataclasses.dataclass(frozen=True)
class ReplicaRows:
    """Rows and constants that a part is measured on."""

    arrays: Sequence[np.ndarray]
    """The rows of one replica."""
    constants: Sequence[AnyArray]
    """The other arrays that the code gets."""

    @property
    def size(self) -> int:
        return len(self.arrays[0])


def find_loss_parts(trace: Trace, trace_of: Callable[[int], Trace], rows: ReplicaRows) -> list[LossPart]:
    """Return the parts of the losses that replica code differentiates, without shares of a mean over the global batch.

    Args:
        trace: The code, traced on the replica's rows.
        trace_of: Traces the code on another number of rows.
        rows: The rows of a replica.
    """
    terms = find_loss_terms(trace)[1]
    if not any(term.of_rows for term in terms):
        return [LossPart(1, term.path, False) for term in terms]
    try:
        return measure_parts(trace, trace_of, rows)
    except Exception:  # as of code that runs on one number of rows alone: this check does not change what is trained
        return [classify_by_divisors(term, rows.size) for term in terms]


def find_loss_terms(trace: Trace) -> tuple[Provenance, list[LossTerm]]:
    sources = Provenance(trace.program, trace.arrays)
    noted = trace.noted
    shares = [share for kind, share in noted.get("share", []) if kind is None]
    return sources, [term for _, loss in noted.get("loss", []) for term in sources.terms(loss, shares)]


def measure_parts(trace: Trace, trace_of: Callable[[int], Trace], rows: ReplicaRows) -> list[LossPart]:
    random = has_random_draws(trace.program)
    times = -(-ENOUGH_ROWS // rows.size) if random else 1
    on_rows = trace if times == 1 else trace_of(rows.size * times)
    on_both = trace_of(rows.size * times * 2)
    parts: list[LossPart] = []
    made_up = dataclasses.replace(rows, arrays=[draw_values_like(np.random.default_rng(0), array) for array in rows.arrays])
    for given in (rows, made_up):  # zeros tell nothing, and a first batch may be of zeros
        once = evaluate_terms(on_rows, given, times)
        twice = evaluate_terms(on_both, given, times * 2)
        parts = []
        for (term, value), (term_twice, value_twice) in zip(once, twice, strict=True):
            growth = (
                compute_growth_ratio(scale_term_value(value, term), scale_term_value(value_twice, term_twice))
                if term.of_rows
                else 1.0
            )
            rounded = None if growth is None else round_growth(growth, random)
            parts.append(LossPart(rounded, keep_common_constants(term.path, term_twice.path), term.of_rows))
        if all(part.growth is not None for part in parts):
            return parts
    terms = (term for term, _ in once)
    return [
        classify_by_divisors(term, rows.size * times) if part.growth is None else part
        for term, part in zip(terms, parts, strict=True)
    ]


def evaluate_terms(trace: Trace, rows: ReplicaRows, times: int) -> list[tuple[LossTerm, Array]]:
    """Return the terms of the losses, each with its value on the rows taken this many times."""
    sources, terms = find_loss_terms(trace)
    repeated = [np.concatenate([array] * times) for array in rows.arrays]
    # The values are those of replica 0, whose row fraction grows with its rows.
    given = dict(zip(trace.program.jaxpr.invars, [*repeated, *rows.constants, np.int32(0), np.float32(times)], strict=True))
    values = evaluate_variables(sources, [term.variable for term in terms], given)
    return list(zip(terms, values, strict=True))


def scale_term_value(value: AnyArray, term: LossTerm) -> AnyArray:
    """Return the value that a term has in the loss, up to factors that are the same for all rows."""
    return value / math.prod(
        divisor
        for divisor in (*term.outer_scaling.divisors, *term.outer_scaling.factors)
        if not isinstance(divisor, NumberArgument)
    )


def evaluate_variables(sources: Provenance, targets: Sequence[Atom], given: AtomValues) -> list[Array]:
    """Return the values of variables of a program; only the equations that lead to them are computed."""
    made, leaves = sources.slice_program(targets, given)
    known = {leaf: given[leaf] if leaf in given else sources.constants[leaf] for leaf in leaves}

    @jax.jit
    def run(known: list[Array]) -> list[Array]:
        values = dict(zip(leaves, known, strict=True))
        done: dict[tuple[int, ...], dict[int, Array]] = {}

        def value_of(variable: Atom) -> Array:
            return variable.val if isinstance(variable, core.Literal) else values[variable]

        for variable, equation in made:
            inputs = [value_of(source) for source in equation.inputs]
            if equation.made_by is None:
                (values[variable],) = inputs
                continue
            key = id(equation.made_by), *(id(source) for source in equation.inputs)
            if key not in done:
                done[key] = run_equation(sources.program, equation.made_by, inputs)
            values[variable] = done[key][equation.index]
        return [value_of(target) for target in targets]

    return run([known[leaf] for leaf in leaves])


def run_equation(program: core.Jaxpr, equation: core.JaxprEqn, inputs: list[Array]) -> dict[int, Array]:
    """Return the results of one equation, by their positions; unused results are left out."""
    names = {
        variable: value for variable, value in zip(equation.invars, inputs, strict=True) if not isinstance(variable, core.Literal)
    }
    used = [index for index, variable in enumerate(equation.outvars) if str(variable) != "_"]
    alone = program.replace(
        constvars=[],
        invars=list(names),
        outvars=[equation.outvars[index] for index in used],
        eqns=[equation],
        effects=equation.effects,
    )
    return dict(zip(used, core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*names.values()), strict=True))


def round_growth(growth: float, random: bool) -> float:
    """Return 1 or 2 where the growth is as near to it as could be measured, else the growth."""
    return next((float(whole) for whole in (1, 2) if abs(growth - whole) <= (ROUGH if random else EXACT)), growth)


def keep_common_constants(path: Scaling, other: Scaling) -> Scaling:
    return Scaling(keep_common_divisors(path.divisors, other.divisors), keep_common_divisors(path.factors, other.factors))


def keep_common_divisors(numbers: Sequence[Divisor], others: Sequence[Divisor]) -> tuple[Divisor, ...]:
    left = list(others)
    common: list[Divisor] = []
    for number in numbers:
        match = next((index for index, other in enumerate(left) if is_alike(number, other)), None)
        if match is not None:
            common.append(left.pop(match))
    return tuple(common)


def is_alike(one: float | NumberArgument, other: float | NumberArgument) -> bool:
    if isinstance(one, NumberArgument) or isinstance(other, NumberArgument):
        return isinstance(one, NumberArgument) and isinstance(other, NumberArgument) and one == other
    return abs(one - other) <= CLOSE * abs(one)


def classify_by_divisors(term: LossTerm, size: int) -> LossPart:
    """Return the part that a term is, as far as the program shows it: a sum over rows that is divided by a replica's rows is a mean."""
    if not term.of_rows:
        return LossPart(1, term.path, False)
    divisors = list(term.path.divisors)
    position = next(
        (
            index
            for index, divisor in enumerate(divisors)
            if term.elements and (is_alike(divisor, term.elements) or is_alike(divisor, size))
        ),
        None,
    )
    if position is None:
        return LossPart(None, term.path, True)
    return LossPart(1, term.path._replace(divisors=tuple(divisors[:position] + divisors[position + 1 :])), True)
