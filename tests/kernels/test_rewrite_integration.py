"""What the rules of operations are for; that operations do not feel the threads is tried in `promise/test_threads_integration.py`."""

from __future__ import annotations

import pytest

from matrix_of_threads import Place, printed


@pytest.mark.slow
def test_the_operations_that_xla_cuts_by_threads_are_cut_by_shapes():
    """Plain ones do differ; where they no longer do, the rules of `contraction` and `kernel` have no use any more."""
    first, *others = (printed(Place(threads=threads), "digest_contractions.py") for threads in (2, 3, 16))
    assert all(other["rewritten"] == first["rewritten"] for other in others)
    assert any(other["plain"][name] != first["plain"][name] for other in others for name in first["plain"] if "conv" in name)
