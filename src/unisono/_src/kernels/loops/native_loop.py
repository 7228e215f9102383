"""Loops whose rows are independent, by the native kernel.

These are recurrent layers, forward and backward. A step of such a loop is matmuls of rows with matrices that are the same at
every step, and elementwise functions. So a block of rows can run through all steps by itself, and its values stay in the
processor's caches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from unisono._src.kernels.loops.loops import LoopInputs, split_inputs
from unisono._src.kernels.loops.row_equations import read_equation
from unisono._src.kernels.loops.row_places import place_step
from unisono._src.kernels.loops.row_steps import NotByRowsError, RowStep
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.row_loops import Address, LoopArrays, RowProgram, call_row_loop
from unisono._src.programs.equations import Params, Producers, Replacement, drop_names
from unisono._src.programs.inlining import inline_calls
from unisono._src.programs.operands import get_dtype, get_shape


class RowLoop(NamedTuple):
    """A loop as the kernel takes it."""

    program: RowProgram
    places: list[int]
    """The numbers of the scanned inputs that are read."""
    prepare: ClosedJaxpr
    """Computes, from the constants, what is the same at every step: fixed rows, shared rows and matrices. `counts` has their numbers."""
    counts: tuple[int, int, int]
    results: list[jax.ShapeDtypeStruct]
    """The results of all steps, in shapes."""


def replace_loop(eqn: JaxprEqn, _: Producers) -> Replacement | None:
    """Replace a `lax.scan` whose rows are independent by a kernel call."""
    if load_kernels().level is None or eqn.effects or not split_inputs(eqn.params, eqn.invars).carries:
        return None
    try:
        loop = read_loop(eqn.params)
    except NotByRowsError:
        return None
    if not loop.program.transposed:  # without matmuls, XLA's loop is as good
        return None
    return Replacement(functools.partial(run_by_kernel, loop, eqn.params), eqn.invars)


def read_loop(params: Params) -> RowLoop:
    """Translate a loop for the kernel. `NotByRowsError` says that it cannot be."""
    body = inline_calls(params["jaxpr"])
    program = body.jaxpr
    inputs = split_inputs(params, program.invars)
    count = len(inputs.carries)
    rows = (*get_shape(inputs.carries[0]), 0)[0]
    check_inputs(rows, inputs)
    constant, preparing = split_constants(program, inputs.consts, rows)
    step = RowStep(rows, inputs.carries, set(inputs.places), constant)
    for eqn in program.eqns:
        if not constant.issuperset(eqn.outvars):
            read_equation(step, eqn)
    for kind, outputs in (("result", program.outvars[count:]), ("next", program.outvars[:count])):
        for index, atom in enumerate(outputs):
            step.write(atom, Address(kind, index))
    placed = place_step(step.instructions, step.widths)
    fixed, shared, read_places = (list(step.arrays[kind]) for kind in ("fixed", "shared", "place"))
    matrices = [matrix for matrix, _ in step.matrices]
    prepare = program.replace(
        invars=list(inputs.consts),
        outvars=[*fixed, *shared, *matrices],
        eqns=preparing,
        debug_info=drop_names(program),
    )
    return RowLoop(
        RowProgram(
            placed.instructions,
            step.numbers,
            [is_transposed for _, is_transposed in step.matrices],
            placed.kept_widths,
            placed.local_widths,
        ),
        [inputs.places.index(place) for place in read_places],
        ClosedJaxpr(prepare, body.consts),
        (len(fixed), len(shared), len(matrices)),
        [jax.ShapeDtypeStruct((params["length"], *get_shape(atom)), get_dtype(atom)) for atom in program.outvars[count:]],
    )


def check_inputs(rows: int, inputs: LoopInputs[Var]) -> None:
    if any(get_shape(variable)[:1] != (rows,) for variable in [*inputs.carries, *inputs.places]):
        raise NotByRowsError("an input has no rows")
    if any(get_dtype(carry) != "float32" for carry in inputs.carries):
        raise NotByRowsError("a carry is of another dtype")


def split_constants(program: Jaxpr, consts: Iterable[Var], rows: int) -> tuple[set[Var], list[JaxprEqn]]:
    """Split off the variables that are the same at every step. The equations that make some of them are listed as well."""
    constant = {*program.constvars, *consts}
    equations: list[JaxprEqn] = []
    for eqn in program.eqns:
        read = [atom for atom in eqn.invars if isinstance(atom, Var)]
        is_broadcast = eqn.primitive.name == "broadcast_in_dim"
        is_number = not read and is_broadcast and get_shape(eqn.outvars[0])[:1] == (rows,)  # an instruction reads it as a number
        if constant.issuperset(read) and not eqn.effects and not is_number:
            constant.update(eqn.outvars)
            equations.append(eqn)
    return constant, equations


def run_by_kernel(loop: RowLoop, params: Params, *operands: Array) -> tuple[Array, ...]:
    """Run the loop by the kernel."""
    inputs = split_inputs(params, operands)
    prepared = jaxpr_as_fun(loop.prepare)(*inputs.consts)
    fixed, shared, _ = loop.counts
    arrays = LoopArrays(
        carries=inputs.carries,
        places=[inputs.places[index] for index in loop.places],
        fixed=prepared[:fixed],
        shared=prepared[fixed : fixed + shared],
        matrices=prepared[fixed + shared :],
    )
    return tuple(call_row_loop(loop.program, params["length"], params["reverse"], arrays, loop.results))
