"""A check that replicas do not draw the same random numbers for their rows, as they do from a fixed seed or a key that all of them get."""

from __future__ import annotations

import warnings

from unisono._src.checks.user_code.inspected_code import InspectedCode
from unisono._src.checks.user_code.provenance import Provenance
from unisono._src.checks.user_code.undistributed_arrays import find_seed_ids
from unisono._src.replica.same_draws import find_draw_for_rows, list_same_draws
from unisono._src.typing import Shape


def warn_of_same_draws(code: InspectedCode) -> None:
    """Warn of random numbers, some for each row, that are drawn from what is the same in all replicas."""
    if code.replicas == 1 or code.trace_of is None:
        return
    trace_of = code.trace_of

    def draws_of(rows: int) -> list[Shape]:
        return list_draws_of_no_replica(code.sources if rows == code.size else trace_of(rows))

    shape = find_draw_for_rows(draws_of, code.size)
    if shape is not None:
        warnings.warn(
            f"The function {code.name!r} draws random numbers of shape {shape}, some for each row, from a seed or a key that is the same in "
            f"all {code.replicas} replicas: every replica gets the same numbers for its rows. Draw them by keras.random, from a "
            f"keras.random.SeedGenerator that was made in the scope, or from a key of the replica: "
            f"jax.random.fold_in(key, un.get_replica_context().replica_id_in_sync_group).",
            stacklevel=2,
        )


def list_draws_of_no_replica(sources: Provenance) -> list[Shape]:
    """Return the shapes of random numbers that depend neither on the replica's rows, nor on its number, nor on a SeedGenerator."""
    program = sources.program
    seeds = find_seed_ids(sources.trace)
    of_replica = [program.jaxpr.invars[position] for position in sources.replica_positions]
    of_seeds = [
        variable for variable, constant in zip(program.jaxpr.constvars, program.consts, strict=True) if id(constant) in seeds
    ]
    return list_same_draws(program.jaxpr, [*of_replica, *of_seeds])
