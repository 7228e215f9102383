"""How the parts of a loss that replica code makes by itself grow with the rows: measured on a replica's rows, and on the same rows taken twice.

A sum doubles, and the sums of replicas add up to that of the batch. A mean stays what it is; so does its gradient, which the engine adds up over
R replicas. What a part is divided by in both programs is no number of rows: so the divisor R is told from the divisor of a mean over R rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from unisono._src.checks.user_code.jaxpr import is_random
from unisono._src.checks.user_code.provenance import CLOSE, Argument, Path, Sources, Term
from unisono._src.replica.growth import ENOUGH, ROUGH, ratio
from unisono._src.replica.probe_rows import drawn_like
from unisono._src.replica.variable_discovery import Trace

MEAN, SUM = 1.0, 2.0
"""How many times as large they are for twice as many rows."""

EXACT = 0.02
"""How far a ratio may be from 1 or 2: half precision rounds long sums."""


class Part(NamedTuple):
    """A part of a loss."""

    growth: float | None
    """1 for a mean over the rows, 2 for a sum; None where nobody could tell."""
    path: Path
    """The constants by which it is divided whatever the number of rows."""
    of_rows: bool


@dataclasses.dataclass(frozen=True)
class ReplicaRows:
    """What a part is measured on."""

    arrays: Sequence[np.ndarray]
    """The rows of one replica."""
    constants: Sequence[Any]
    """What else the code is given."""

    @property
    def size(self) -> int:
        return len(self.arrays[0])


def parts_of_losses(trace: Trace, trace_of: Callable[[int], Trace], rows: ReplicaRows) -> list[Part]:
    """Return the parts of the losses that replica code differentiates, apart from shares of a mean over the global batch.

    Args:
        trace: The code on as many rows as there are.
        trace_of: Traces it on another number of rows.
        rows: A replica's.
    """
    terms = terms_of(trace)[1]
    if not any(term.of_rows for term in terms):
        return [Part(1, term.path, False) for term in terms]
    try:
        return measured(trace, trace_of, rows)
    except Exception:  # code that runs on its own number of rows alone, say: what it trains does not depend on this look at it
        return [by_form(term, rows.size) for term in terms]


def terms_of(trace: Trace) -> tuple[Sources, list[Term]]:
    sources, noted = Sources(trace.program, trace.arrays), trace.noted
    shares = [share for kind, share in noted.get("share", []) if kind is None]
    return sources, [term for _, loss in noted.get("loss", []) for term in sources.terms(loss, shares)]


def measured(trace: Trace, trace_of: Callable[[int], Trace], rows: ReplicaRows) -> list[Part]:
    random = is_random(trace.program)
    times = -(-ENOUGH // rows.size) if random else 1
    on_rows = trace if times == 1 else trace_of(rows.size * times)
    on_both = trace_of(rows.size * times * 2)
    parts: list[Part] = []
    made_up = dataclasses.replace(rows, arrays=[drawn_like(np.random.default_rng(0), array) for array in rows.arrays])
    for given in (rows, made_up):  # zeros tell nothing, and a first batch may be of zeros
        once, twice = terms_and_values(on_rows, given, times), terms_and_values(on_both, given, times * 2)
        parts = []
        for (term, value), (again, more) in zip(once, twice, strict=True):
            growth = ratio(divided(value, term), divided(more, again)) if term.of_rows else 1.0
            grown = None if growth is None else rounded(growth, random)
            parts.append(Part(grown, in_both(term.path, again.path), term.of_rows))
        if all(part.growth is not None for part in parts):
            return parts
    terms = (term for term, _ in once)
    return [by_form(term, rows.size * times) if part.growth is None else part for term, part in zip(terms, parts, strict=True)]


def terms_and_values(trace: Trace, rows: ReplicaRows, times: int) -> list[tuple[Term, Any]]:
    sources, terms = terms_of(trace)
    many = [np.concatenate([array] * times) for array in rows.arrays]
    # Of a replica with the number 0, whose share of the rows grows with them.
    given = dict(zip(trace.program.jaxpr.invars, [*many, *rows.constants, np.int32(0), np.float32(times)], strict=True))
    values = evaluated(sources, [term.variable for term in terms], given)
    return list(zip(terms, values, strict=True))


def divided(value: Any, term: Term) -> Any:
    """Return what the part is in the loss, up to what is the same for all rows."""
    return value / math.prod(d for d in (*term.outside.divisors, *term.outside.factors) if not isinstance(d, Argument))


def evaluated(sources: Sources, targets: Sequence[Any], given: dict[Any, Any]) -> list[Any]:
    """Return the values of variables of a program; nothing is computed but what leads to them."""
    made, leaves = sources.what_makes(targets, given)
    known = {leaf: given[leaf] if leaf in given else sources.constants[leaf] for leaf in leaves}

    @jax.jit
    def run(known: list[Any]) -> list[Any]:
        values, done = dict(zip(leaves, known, strict=True)), {}

        def value_of(variable: Any) -> Any:
            return variable.val if isinstance(variable, core.Literal) else values[variable]

        for variable, equation in made:
            inputs = [value_of(source) for source in equation.inputs]
            if equation.made_by is None:
                (values[variable],) = inputs
                continue
            key = id(equation.made_by), *(id(source) for source in equation.inputs)
            if key not in done:
                done[key] = computed(sources.program, equation.made_by, inputs)
            values[variable] = done[key][equation.index]
        return [value_of(target) for target in targets]

    return run([known[leaf] for leaf in leaves])


def computed(program: core.Jaxpr, equation: core.JaxprEqn, inputs: list[Any]) -> dict[int, Any]:
    """Return the results of one equation, by their places; those that nobody uses are left out."""
    names = {v: value for v, value in zip(equation.invars, inputs, strict=True) if not isinstance(v, core.Literal)}
    used = [i for i, v in enumerate(equation.outvars) if str(v) != "_"]
    alone = program.replace(
        constvars=[], invars=list(names), outvars=[equation.outvars[i] for i in used], eqns=[equation], effects=equation.effects
    )
    return dict(zip(used, core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*names.values()), strict=True))


def rounded(growth: float, random: bool) -> float:
    """1 or 2 where it is that, as near as it could be measured."""
    return next((float(whole) for whole in (1, 2) if abs(growth - whole) <= (ROUGH if random else EXACT)), growth)


def in_both(path: Path, other: Path) -> Path:
    return Path(common(path.divisors, other.divisors), common(path.factors, other.factors))


def common(numbers: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    left, found = list(others), []
    for number in numbers:
        match = next((i for i, other in enumerate(left) if is_alike(number, other)), None)
        if match is not None:
            found.append(left.pop(match))
    return tuple(found)


def is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Argument) or isinstance(other, Argument):
        return isinstance(one, Argument) and isinstance(other, Argument) and one == other
    return abs(one - other) <= CLOSE * abs(one)


def by_form(term: Term, size: int) -> Part:
    """Return what the program alone shows: a sum over rows that is divided by as many as a replica has is a mean."""
    if not term.of_rows:
        return Part(1, term.path, False)
    divisors = list(term.path.divisors)
    own = next((i for i, d in enumerate(divisors) if term.elements and (is_alike(d, term.elements) or is_alike(d, size))), None)
    if own is None:
        return Part(None, term.path, True)
    return Part(1, term.path._replace(divisors=tuple(divisors[:own] + divisors[own + 1 :])), True)
