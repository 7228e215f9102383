"""Hoist matmuls and sums out of loops.

They are then computed for all steps at once. A recurrent layer multiplies each step's input with its kernel, and adds up the
gradients by its weights, within a loop: matmuls of a few rows, one after another. But only the matmuls of the state need the step
before. The others are taken out of the loop: as one matmul of all inputs before it, as one after it, or, where a carry adds up
matmuls, as one that is contracted over the steps.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from unisono._src.programs.equations import Params, Producers, Replacement, drop_names
from unisono._src.programs.operands import Atom, get_shape
from unisono._src.programs.private.jaxprs import count_loop_inputs

MOST_STACKED = 1 << 28
"""The most elements of an operand, over all steps. A matmul of more stays in the loop, since its operands are kept for the whole loop."""

ADDITIONS = ("add", "add_any")
LINEAR = (*ADDITIONS, "broadcast_in_dim", "concatenate", "pad", "reduce_sum", "reshape", "squeeze", "transpose")

Arrays: TypeAlias = list[Array]
InputT = TypeVar("InputT")


class LoopInputs(NamedTuple, Generic[InputT]):
    """The inputs of a `lax.scan`, or of its step, by their roles."""

    consts: Sequence[InputT]
    carries: Sequence[InputT]
    places: Sequence[InputT]
    """The scanned inputs (`xs` of `lax.scan`): each step reads its own slice."""


def split_inputs(params: Params, inputs: Sequence[InputT]) -> LoopInputs[InputT]:
    """Split the inputs of a `lax.scan` by their roles."""
    counts = count_loop_inputs(params)
    end = counts.consts + counts.carries
    return LoopInputs(inputs[: counts.consts], inputs[counts.consts : end], inputs[end:])


class LoopBody:
    """The jaxpr of one step of a `lax.scan`, with named variables."""

    def __init__(self, params: Params) -> None:
        self.program: Jaxpr = params["jaxpr"].jaxpr
        self.length: int = params["length"]
        self.made_by = Producers(self.program)
        inputs = split_inputs(params, self.program.invars)
        self.consts = inputs.consts
        self.carries = inputs.carries
        self.places = inputs.places
        self.next_carries = self.program.outvars[: len(inputs.carries)]
        self.results = self.program.outvars[len(inputs.carries) :]
        """The stacked outputs (`ys` of `lax.scan`): each step writes its own slice."""
        read = [atom for eqn in self.program.eqns for atom in eqn.invars] + list(self.program.outvars)
        self._times_read = collections.Counter(atom for atom in read if isinstance(atom, Var))

    def is_read_once(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and self._times_read[atom] == 1

    def can_stack(self, atom: Atom) -> bool:
        """Whether an operand is a variable, small enough for all steps together."""
        return isinstance(atom, Var) and math.prod(get_shape(atom)) * self.length <= MOST_STACKED


@dataclasses.dataclass
class Hoisted:
    """The matmuls and sums that leave a loop."""

    before: list[JaxprEqn]
    """Matmuls of inputs alone; a step then reads the result."""
    after: dict[int, JaxprEqn]
    """Matmuls that are nothing but a result of the loop, by the number of the result."""
    sums: dict[int, Sum]
    """What a carry accumulates, by the number of the carry."""

    def list_late_operands(self) -> list[Var]:
        """List the operands of what is computed after the loop, without repeats."""
        late = [*self.after.values(), *(root for total in self.sums.values() for root in total.roots)]
        return list(dict.fromkeys(atom for eqn in late for atom in eqn.invars if isinstance(atom, Var)))

    def remove_from(self, eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """The equations that stay in the loop."""
        sums = [eqn for total in self.sums.values() for eqn in [*total.roots, *total.equations]]
        leaving = [*self.before, *self.after.values(), *sums]
        numbers = set(map(id, leaving))
        return [eqn for eqn in eqns if id(eqn) not in numbers]


class Operands(NamedTuple):
    """The arrays of a loop's variables.

    `shared` ones are the same for all steps, `stacked` ones have a first dimension of steps.
    """

    shared: dict[Var, Array]
    stacked: dict[Var, Array]

    def get(self, atom: Atom) -> Array:
        assert isinstance(atom, Var)
        return self.stacked[atom] if atom in self.stacked else self.shared[atom]


@dataclasses.dataclass
class Sum:
    """A carry that only accumulates a linear function of matmuls or sums. Nothing else reads it."""

    roots: list[JaxprEqn]
    """The matmuls and the sums."""
    equations: list[JaxprEqn]
    """The linear function and the additions, in order: they hold for the totals of all steps, too."""

    @classmethod
    def join(cls, parts: Iterable[Sum], eqn: JaxprEqn) -> Sum:
        """Join the sums of an equation's operands."""
        parts = list(parts)
        equations = [earlier for part in parts for earlier in part.equations]
        return cls([root for part in parts for root in part.roots], [*equations, eqn])


def hoist_products(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Replace a `lax.scan` by one without the matmuls that can leave it."""
    body = LoopBody(eqn.params)
    if body.length < 2 or body.program.effects:
        return None
    sums = dict(find_sums(body))
    summed = {id(root) for total in sums.values() for root in total.roots}
    products = [step for step in body.program.eqns if is_product(step) and id(step) not in summed]
    before = [step for step in products if is_of_inputs(body, step)]
    after = {number: step for number, step in find_products_after(body, products) if step not in before}
    hoisted = Hoisted(before, after, sums)
    if not (before or after or sums):
        return None
    return Replacement(functools.partial(run_shorter_loop, body, hoisted, eqn.params), eqn.invars)


def is_product(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general" and eqn.params["out_sharding"] is None


def is_of_inputs(body: LoopBody, product: JaxprEqn) -> bool:
    """Whether a matmul multiplies inputs of the step only. At least one of them is the step's own."""
    inputs = {*body.consts, *body.places}
    are_inputs = all(isinstance(atom, Var) and atom in inputs for atom in product.invars)
    return are_inputs and any(atom in body.places for atom in product.invars) and body.can_stack(product.outvars[0])


def find_products_after(body: LoopBody, products: Iterable[JaxprEqn]) -> Iterable[tuple[int, JaxprEqn]]:
    """Yield the matmuls that are nothing but a result, by its number. Matmuls of constants stay."""
    for product in products:
        (made,) = product.outvars
        differs = not all(atom in body.consts for atom in product.invars)
        if body.is_read_once(made) and made in body.results and differs and all(map(body.can_stack, product.invars)):
            yield body.results.index(made), product


def find_sums(body: LoopBody) -> Iterable[tuple[int, Sum]]:
    """Yield the carries that only accumulate matmuls or sums, by number."""
    for number, (carry, following) in enumerate(zip(body.carries, body.next_carries, strict=True)):
        if body.is_read_once(carry) and following is not carry:
            total = find_additions(body, following, carry)
            if total is not None:
                yield number, total


def find_additions(body: LoopBody, atom: Atom, carry: Var) -> Sum | None:
    """Trace a carry's next value back through additions to the carry. None if other equations take part."""
    if atom is carry:
        return Sum([], [])
    addition = body.made_by.find_if_read_once(atom)
    if addition is None or addition.primitive.name not in ADDITIONS:
        return None
    for left, right in (addition.invars, addition.invars[::-1]):
        before = find_additions(body, left, carry)
        added = find_linear_function(body, right) if before else None
        if before and added:
            return Sum.join([before, added], addition)
    return None


def find_linear_function(body: LoopBody, atom: Atom) -> Sum | None:
    """Trace linear equations back to matmuls and sums. None if other equations take part."""
    eqn = body.made_by.find_if_read_once(atom)
    if eqn is None:
        return None
    if eqn.primitive.name in LINEAR:
        parts = [find_linear_function(body, operand) for operand in eqn.invars if not holds_zeros(operand)]
        linear = [part for part in parts if part]
        if len(linear) == len(parts):
            return Sum.join(linear, eqn)
    are_stacked = all(body.can_stack(operand) and operand not in body.consts for operand in eqn.invars)
    return Sum([eqn], []) if are_stacked and (is_product(eqn) or eqn.primitive.name == "reduce_sum") else None


def holds_zeros(atom: Atom) -> bool:
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def run_shorter_loop(body: LoopBody, hoisted: Hoisted, params: Params, *operands: Array) -> tuple[Array, ...]:
    """Run the loop without the hoisted equations, which run before and after."""
    inputs = split_inputs(params, operands)
    values = Operands(
        shared=dict(zip(body.consts, inputs.consts, strict=True)),
        stacked=dict(zip(body.places, inputs.places, strict=True)),
    )
    for product in hoisted.before:
        values.stacked[product.outvars[0]] = multiply_at_all_steps(product, values)
    carried = [number for number in range(len(body.carries)) if number not in hoisted.sums]
    written = [number for number in range(len(body.results)) if number not in hoisted.after]
    # The operands of a matmul after the loop are results of the loop now.
    kept = [atom for atom in hoisted.list_late_operands() if atom not in values.stacked and atom not in values.shared]
    step = body.program.replace(
        invars=[*body.consts, *(body.carries[number] for number in carried), *values.stacked],
        outvars=[*(body.next_carries[number] for number in carried), *(body.results[number] for number in written), *kept],
        eqns=hoisted.remove_from(body.program.eqns),
        debug_info=drop_names(body.program),
    )
    first = [inputs.carries[number] for number in carried]
    last, made = run_loop(step, params, LoopInputs(inputs.consts, first, list(values.stacked.values())))
    values.stacked.update(zip(kept, made[len(written) :], strict=True))

    finals = dict(zip(carried, last, strict=True))
    results = dict(zip(written, made[: len(written)], strict=True))
    finals |= {number: add_up(body, number, total, inputs.carries[number], values) for number, total in hoisted.sums.items()}
    results |= {number: multiply_at_all_steps(product, values) for number, product in hoisted.after.items()}
    return (*(finals[number] for number in range(len(body.carries))), *(results[number] for number in range(len(body.results))))


def run_loop(step: Jaxpr, params: Params, inputs: LoopInputs[Array]) -> tuple[Arrays, Arrays]:
    """Run a loop with another step: last carries, and all steps' results. The other parameters are those of `params`."""
    run_step = jaxpr_as_fun(ClosedJaxpr(step, params["jaxpr"].consts))
    count = len(inputs.carries)

    def run(state: Arrays, places: Arrays) -> tuple[Arrays, Arrays]:
        outputs = run_step(*inputs.consts, *state, *places)
        return list(outputs[:count]), list(outputs[count:])

    places = list(inputs.places)
    return lax.scan(run, list(inputs.carries), places, params["length"], reverse=params["reverse"], unroll=params["unroll"])


def multiply_at_all_steps(product: JaxprEqn, values: Operands) -> Array:
    """Compute a matmul at all steps, stacked along a new first dimension."""
    axes = tuple(0 if atom in values.stacked else None for atom in product.invars)
    multiply = functools.partial(lax.dot_general, **get_arguments(product))
    return jax.vmap(multiply, in_axes=axes)(*map(values.get, product.invars))


def add_up(body: LoopBody, number: int, total: Sum, first: Array, values: Operands) -> Array:
    """Compute a carry's last value from its first and the totals. Its equations are linear, so they are applied once."""
    totals = [sum_over_steps(root, values) for root in total.roots]
    program = body.program.replace(
        invars=[body.carries[number], *(root.outvars[0] for root in total.roots)],
        outvars=[body.next_carries[number]],
        eqns=total.equations,
        debug_info=drop_names(body.program),
    )
    (last,) = jaxpr_as_fun(ClosedJaxpr(program, []))(first, *totals)
    return last


def sum_over_steps(root: JaxprEqn, values: Operands) -> Array:
    """Contract a matmul, or extend a sum, over the steps too."""
    operands = [values.get(atom) for atom in root.invars]
    if root.primitive.name == "reduce_sum":
        return lax.reduce_sum(operands[0], axes=(0, *(axis + 1 for axis in root.params["axes"])))
    contracted, batch = root.params["dimension_numbers"]
    numbers = (
        tuple((0, *(axis + 1 for axis in axes)) for axes in contracted),
        tuple(tuple(axis + 1 for axis in axes) for axes in batch),
    )
    left, right = operands
    return lax.dot_general(left, right, **{**get_arguments(root), "dimension_numbers": numbers})


def get_arguments(product: JaxprEqn) -> Params:
    return {name: product.params[name] for name in ("dimension_numbers", "precision", "preferred_element_type")}
