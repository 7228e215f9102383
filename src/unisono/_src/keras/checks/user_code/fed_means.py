"""Mean metrics that are fed with a replica's own mean.

Metrics take the value that the code has on all rows. A number that stands for the mean over a replica's rows is something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend import core

from unisono._src.keras.checks.user_code.inspected_code import InspectedCode
from unisono._src.keras.checks.user_code.loss_growth import TwoTraces
from unisono._src.keras.checks.user_code.loss_scaling import is_near_number, list_products
from unisono._src.keras.replica.refused_calls import refuse_mean_of_part


def check_earlier_shares(code: InspectedCode) -> None:
    """Refuse means that are fed with an earlier run's loss shares."""
    inputs = code.sources.program.jaxpr.invars
    shares = [inputs[position] for position in code.carried_shares]
    for metric, value in code.trace.noted.get("fed", []) if shares and code.replicas > 1 else []:
        if code.sources.can_reach(value, shares):
            refuse_mean_of_part(metric, "a replica's share of a loss, which an earlier run has returned.")


def check_fed_means(both: TwoTraces, replicas: int, rows: int, size: int) -> None:
    """Refuse means fed with a replica's mean, or R times a share.

    `rows` are those of the global batch, `size` are those of the replica.
    """
    noted = both.on_rows.trace.noted
    shares = [share for _, share in noted.get("share", [])]
    pairs = zip(noted.get("fed", []), both.on_both.trace.noted.get("fed", []), strict=False)
    for (metric, value), (_, twice) in pairs:
        if isinstance(twice, core.Literal) or both.growth.of(twice).power != 1:
            continue
        terms = [term for term in both.on_rows.terms(value, shares) if term.elements]
        if rows > size and any(is_of_replica(list(list_products(term.path.known_numbers)), rows, size) for term in terms):
            refuse_mean_of_part(metric, f"a sum that is divided by {size}, the rows of one replica.")
        scalings = both.on_rows.list_scalings(value, set(shares))
        if any(is_near_number(math.prod(scaling.known_numbers), 1 / replicas) for scaling in scalings):
            refuse_mean_of_part(metric, f"a share of a loss times {replicas}, the number of replicas.")


def is_of_replica(numbers: Sequence[float], rows: int, size: int) -> bool:
    """Whether these divisors are the replica's rows, and not the batch's. They may be products of divisors."""
    by_replica, by_batch = (any(is_near_number(number, each) for number in numbers) for each in (size, rows))
    return by_replica and not by_batch
