"""Operations have the same bits whatever the number of threads."""

from __future__ import annotations

import os
import random

import pytest

from matrix_of_threads import Place, different, operations, printed
from sizes import cases

PLACES = [Place(threads=threads) for threads in cases((2, 3), (2, 3, 8))]
COUNT = cases(25, 60)
"""Operations of one seed: a minute for a hundred."""


@pytest.mark.slow
def test_the_operations_that_xla_cuts_by_threads_are_cut_by_shapes():
    """Plain ones do differ; where they no longer do, the rules of `contraction` and `kernel` have no use any more."""
    first, *others = (printed(Place(threads=threads), "digest_contractions.py") for threads in (2, 3, 16))
    assert all(other["rewritten"] == first["rewritten"] for other in others)
    assert any(other["plain"][name] != first["plain"][name] for other in others for name in first["plain"] if "conv" in name)


def test_single_operations_do_not_feel_the_threads():
    """UNISONO_SEED, which is printed where this fails, draws the same operations again; `make matrix` tries more, in more places."""
    seed = int(os.environ.get("UNISONO_SEED", random.randrange(10**6)))
    print(f"UNISONO_SEED={seed}")
    first, *others = (operations(place, seed, COUNT) for place in PLACES)
    for place, other in zip(PLACES[1:], others, strict=True):
        assert different(other, first) == [], str(place)
