"""A check that replicas do not draw the same random numbers for their rows, as they do from a fixed seed or a key that all of them get."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from unisono._src.checks.user_code.inspected_code import InspectedCode
from unisono._src.checks.user_code.jaxpr import find_dependents
from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.checks.user_code.undistributed_arrays import find_seed_ids
from unisono._src.typing import Shape

DRAWS = ("random_bits", "rng_bit_generator", "rng_uniform")
"""Primitives that make random numbers of a key or a state."""


def warn_of_same_draws(code: InspectedCode) -> None:
    """Warn of random numbers, some for each row, that are drawn from what is the same in all replicas."""
    if code.replicas == 1 or code.trace_of is None:
        return
    drawn = list(list_same_draws(code.sources))
    if not any(shape and shape[0] and not shape[0] % code.size for shape in drawn):
        return
    try:
        drawn_for_more = list_same_draws(code.trace_of(2 * code.size))
    except Exception:  # of the user's code, which was not written for more rows
        return
    shape = next((one for one, more in zip(drawn, drawn_for_more, strict=False) if one and more[:1] == (2 * one[0],)), None)
    if shape is not None:
        warnings.warn(
            f"The function {code.name!r} draws random numbers of shape {shape}, some for each row, from a seed or a key that is the same in "
            f"all {code.replicas} replicas: every replica gets the same numbers for its rows. Draw them by keras.random, from a "
            f"keras.random.SeedGenerator that was made in the scope, or from a key of the replica: "
            f"jax.random.fold_in(key, un.get_replica_context().replica_id_in_sync_group).",
            stacklevel=2,
        )


def list_same_draws(sources: Provenance) -> Iterable[Shape]:
    """Yield the shapes of random numbers that depend neither on the replica's rows, nor on its number, nor on a SeedGenerator."""
    program = sources.program
    seeds = find_seed_ids(sources.trace)
    of_replica = [program.jaxpr.invars[position] for position in sources.replica_positions]
    of_seeds = [
        variable for variable, constant in zip(program.jaxpr.constvars, program.consts, strict=True) if id(constant) in seeds
    ]
    differing = find_dependents(program.jaxpr, [*of_replica, *of_seeds])
    for equation in program.jaxpr.eqns:
        if equation.primitive.name in DRAWS and equation.outvars[0] not in differing:
            yield equation.outvars[0].aval.shape
