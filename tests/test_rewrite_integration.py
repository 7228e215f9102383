"""Products and convolutions have the same bits whatever the number of threads."""

from __future__ import annotations

import json

from processes import HERE, python


def digests(threads):
    done = python(str(HERE / "digest_contractions.py"), PJRT_NPROC=str(threads), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_product_or_convolution_depends_on_the_pool_of_threads():
    """Plain ones do; where they no longer do, the rules of `contraction` and `kernel` have no use any more."""
    first, *others = (digests(threads) for threads in (1, 2, 4, 16))
    assert all(other["rewritten"] == first["rewritten"] for other in others)
    assert any(other["plain"] != first["plain"] for other in others)
