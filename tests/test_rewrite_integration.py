"""Products, convolutions and sums have the same bits whatever the number of threads."""

from __future__ import annotations

import json

from processes import HERE, python


def digests(threads):
    done = python(str(HERE / "digest_contractions.py"), PJRT_NPROC=str(threads), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_product_convolution_or_sum_depends_on_the_pool_of_threads():
    """Plain ones do; where they no longer do, the rules of `contraction`, `kernel` and `reduction` have no use any more."""
    first, *others = (digests(threads) for threads in (2, 3, 16))
    assert all(other["rewritten"] == first["rewritten"] for other in others)
    for kind in ("conv", "variance"):
        assert any(other["plain"][name] != first["plain"][name] for other in others for name in first["plain"] if kind in name)
