"""Recompute cheap residuals in the backward loop, instead of storing them.

Differentiation keeps what the gradient multiplies with: of a logistic function both its value and `value * (1 - value)`, of a
hyperbolic tangent both its value and `1 - value`. Each is an array of all steps, which the loop forward writes and the loop
backward reads. One pass through memory takes longer than the multiplication. So a value is computed again if it is a product or a
sum of other kept values.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import NamedTuple

from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from unisono._src.kernels.loops.loops import LoopBody, LoopInputs, run_loop, split_inputs
from unisono._src.programs.equations import Params, Producers, Replacement, drop_names, drop_unread, make_call
from unisono._src.programs.inlining import inline_calls
from unisono._src.programs.operands import Atom

CHEAP = ("add", "add_any", "sub", "mul", "neg", "square", "one_minus_square", "copy", "broadcast_in_dim")
MOST_EQUATIONS = 4
"""The most equations with which a value may be computed again."""


class Recipe(NamedTuple):
    """The equations that compute a result of a step from other results."""

    equations: list[JaxprEqn]
    made: Var
    needed: dict[Var, Var]
    """The other results, with the arrays that hold them at all steps."""


Readers = Mapping[Var, list[JaxprEqn | None]]
"""The equations that read a variable; None stands for the jaxpr's results."""


def recompute_residuals(program: Jaxpr) -> Jaxpr:
    """Rewrite loops to keep less for later loops. The jaxpr is the same object if there is nothing to leave out."""
    readers = find_readers(program)
    recipes: dict[Var, Recipe] = {}
    for eqn in program.eqns:
        if eqn.primitive.name == "scan" and not eqn.effects:
            recipes |= find_recipes(eqn, readers)
    if not recipes:
        return program
    return program.replace(eqns=[shorten_loop(eqn, recipes) if eqn.primitive.name == "scan" else eqn for eqn in program.eqns])


def find_readers(program: Jaxpr) -> Readers:
    readers: dict[Var, list[JaxprEqn | None]] = collections.defaultdict(list)
    for atoms, reader in [*((eqn.invars, eqn) for eqn in program.eqns), (program.outvars, None)]:
        for atom in atoms:
            if isinstance(atom, Var):
                readers[atom].append(reader)
    return readers


def find_recipes(eqn: JaxprEqn, readers: Readers) -> dict[Var, Recipe]:
    """Find recipes for results of a loop that only later loops read."""
    body = inline_calls(eqn.params["jaxpr"]).jaxpr
    made_by = Producers(body)
    carries = len(split_inputs(eqn.params, eqn.invars).carries)
    results = list(zip(body.outvars[carries:], eqn.outvars[carries:], strict=True))
    arrays = {made: array for made, array in results if isinstance(made, Var)}
    recipes: dict[Var, Recipe] = {}
    needed: set[Var] = set()
    for made, array in results:
        if not isinstance(made, Var) or array in needed or not is_read_by_steps(array, eqn, readers):
            continue
        others = {other: kept for other, kept in arrays.items() if kept not in recipes and other is not made}
        recipe = find_recipe(made, made_by, others)
        if recipe:
            recipes[array] = recipe
            needed.update(recipe.needed.values())
    return recipes


def is_read_by_steps(array: Var, eqn: JaxprEqn, readers: Readers) -> bool:
    """Whether only loops of equal length read an array, step by step."""

    def reads_by_steps(reader: JaxprEqn | None) -> bool:
        if reader is None or reader.primitive.name != "scan" or reader.params["length"] != eqn.params["length"]:
            return False
        inputs = split_inputs(reader.params, reader.invars)
        return all(atom is not array for atom in [*inputs.consts, *inputs.carries])

    return array in readers and all(map(reads_by_steps, readers[array]))


def find_recipe(made: Var, made_by: Producers, others: Mapping[Var, Var]) -> Recipe | None:
    """Find how a result is computed from others. None if that takes more than a few cheap equations."""
    equations: dict[Var, JaxprEqn] = {}
    needed: dict[Var, Var] = {}

    def collect(atom: Atom) -> bool:
        if isinstance(atom, Literal) or atom in equations:
            return True
        if atom in others:
            needed[atom] = others[atom]
            return True
        eqn = made_by.find(atom)
        if eqn is None or eqn.primitive.name not in CHEAP or not all(map(collect, eqn.invars)):
            return False
        equations[atom] = eqn
        return len(equations) <= MOST_EQUATIONS

    return Recipe(list(equations.values()), made, needed) if collect(made) and needed else None


def shorten_loop(eqn: JaxprEqn, recipes: Mapping[Var, Recipe]) -> JaxprEqn:
    """Remove the results that have recipes from a loop. Where its steps read such a result of another loop, they compute it."""
    body = LoopBody(eqn.params)
    inputs = split_inputs(eqn.params, eqn.invars)
    places = [(array, inside) for array, inside in zip(inputs.places, body.places, strict=True) if isinstance(array, Var)]
    read = {array: inside for array, inside in places if array not in recipes}
    equations: list[JaxprEqn] = []
    for array, inside in places:
        if array in recipes:
            equations += follow_recipe(recipes[array], read, inside)
    left = [place for place, array in enumerate(eqn.outvars) if array not in recipes]
    if not equations and len(left) == len(eqn.outvars):
        return eqn
    step = body.program.replace(
        invars=[*body.consts, *body.carries, *read.values()],
        outvars=[body.program.outvars[place] for place in left],
        eqns=[*equations, *body.program.eqns],
        debug_info=drop_names(body.program),
    )
    run = functools.partial(run_shorter_step, drop_unread(step), eqn.params, len(body.consts), len(body.carries))
    shorter = eqn.replace(outvars=[eqn.outvars[place] for place in left])
    return make_call(Replacement(run, [*inputs.consts, *inputs.carries, *read]), shorter)


def follow_recipe(recipe: Recipe, read: dict[Var, Var], result: Var) -> list[JaxprEqn]:
    """Build equations that make a result.

    `read` holds the variables of a step by the arrays that they are read from; others are added.
    """
    for other, array in recipe.needed.items():
        read.setdefault(array, Var(other.aval))
    names = {other: read[array] for other, array in recipe.needed.items()}
    equations: list[JaxprEqn] = []
    for eqn in recipe.equations:
        (made,) = eqn.outvars
        inputs = [atom if isinstance(atom, Literal) else names[atom] for atom in eqn.invars]
        names[made] = result if made is recipe.made else Var(made.aval)  # two loops may have the same step
        equations.append(eqn.replace(invars=inputs, outvars=[names[made]]))
    return equations


def run_shorter_step(step: Jaxpr, params: Params, consts: int, carries: int, *operands: Array) -> tuple[Array, ...]:
    """Run a loop with another step."""
    end = consts + carries
    last, made = run_loop(step, params, LoopInputs(operands[:consts], operands[consts:end], operands[end:]))
    return (*last, *made)
