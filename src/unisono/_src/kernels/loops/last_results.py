"""Read a loop's last result from its carry.

This is for loops whose only needed result is that of the last step, where it is a carry as well. A layer of Keras that returns
its last state makes a result at every step, and takes the last one. In the gradient of that, the loop backward reads an array of
zeros for all other steps.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from unisono._src.kernels.loops.loops import LoopBody
from unisono._src.programs.equations import Producers, Replacement, drop_unread, make_call
from unisono._src.programs.inlining import inline_short_calls
from unisono._src.programs.operands import Atom, get_shape
from unisono._src.programs.private.jaxprs import drop_unneeded


class Carried(NamedTuple):
    """A carry of a loop, after the last step."""

    loop: JaxprEqn
    number: int


def read_last_results_from_carries(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[bool]]:
    """Rewrite loops whose results are needed at the last step alone. Also tell which arguments the new jaxpr still reads."""
    plain = drop_unread(inline_short_calls(program.jaxpr))
    made_by = Producers(plain)
    carried = {id(eqn): carry for eqn in plain.eqns if (carry := find_carried(eqn, made_by))}
    if not carried:
        return program, [True] * len(program.jaxpr.invars)
    shorter = read_from_carries(plain, carried)
    return drop_unneeded(ClosedJaxpr(shorter, program.consts), [True] * len(shorter.outvars))


def find_carried(eqn: JaxprEqn, made_by: Producers) -> Carried | None:
    """Find the carry that equals the last result that an equation slices. None if it takes anything else."""
    if eqn.primitive.name != "slice":
        return None
    whole = get_shape(eqn.invars[0])
    if get_shape(eqn.outvars[0]) != (1, *whole[1:]):
        return None
    place = eqn.params["start_indices"][0]
    results, is_flipped = find_unflipped(eqn.invars[0], made_by)
    loop = made_by.find(results)
    if not isinstance(results, Var) or loop is None or loop.primitive.name != "scan" or loop.effects:
        return None
    last = 0 if loop.params["reverse"] != is_flipped else whole[0] - 1
    body = LoopBody(loop.params)
    number = loop.outvars.index(results) - len(body.carries)
    if place != last or number < 0 or body.results[number] not in body.next_carries:
        return None
    return Carried(loop, body.next_carries.index(body.results[number]))


def find_unflipped(atom: Atom, made_by: Producers) -> tuple[Atom, bool]:
    """Undo a reversal along the first dimension. The flag tells whether there was one."""
    maker = made_by.find(atom)
    if maker is not None and maker.primitive.name == "rev" and tuple(maker.params["dimensions"]) == (0,):
        return maker.invars[0], True
    return atom, False


def read_from_carries(program: Jaxpr, carried: dict[int, Carried]) -> Jaxpr:
    """Make some equations, given by their ids, read carries."""
    # A result that nothing read has no name: each carry gets a new one.
    names = {(id(loop), number): Var(loop.outvars[number].aval) for loop, number in carried.values()}
    renamed = {loop.outvars[number]: names[id(loop), number] for loop, number in carried.values()}
    eqns: list[JaxprEqn] = []
    for eqn in program.eqns:
        if id(eqn) in carried:
            loop, number = carried[id(eqn)]
            eqn = make_call(Replacement(add_first_dimension, [names[id(loop), number]]), eqn)
        inputs = [renamed.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars]
        eqns.append(eqn.replace(invars=inputs, outvars=[names.get((id(eqn), i), made) for i, made in enumerate(eqn.outvars)]))
    outputs = [renamed.get(atom, atom) if isinstance(atom, Var) else atom for atom in program.outvars]
    return program.replace(eqns=eqns, outvars=outputs)


def add_first_dimension(carry: Array) -> Array:
    return lax.expand_dims(carry, [0])
