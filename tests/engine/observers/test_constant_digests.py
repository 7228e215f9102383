"""Digests of the values that are the same for all replicas: other values have another digest, and reading them seldom raises no false alarm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono._src.engine.observers.process_comparison import ConstantDigests

CALLS = 20
POWERS = {1, 2, 4, 8, 16}


def on(platform: str) -> ConstantDigests:
    return ConstantDigests(cast(jax.Device, SimpleNamespace(platform=platform)))


def differing_calls(platform: str, one: Any, other: Any) -> set[int]:
    """Return the calls at which two processes have other digests; `one` and `other` return the constants of a call."""
    first, second = on(platform), on(platform)
    return {call for call in range(1, CALLS + 1) if first.digest(one(call)) != second.digest(other(call))}


@pytest.mark.parametrize(("platform", "expected"), [("cpu", set(range(1, CALLS + 1))), ("gpu", POWERS), ("tpu", POWERS)])
def test_another_array_is_seen(platform, expected):
    assert differing_calls(platform, lambda call: [jnp.full(3, call)], lambda call: [jnp.full(3, call + 1)]) == expected


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_an_array_that_comes_again_is_one_with_equal_new_arrays(platform):
    kept = jnp.arange(5.0)
    assert differing_calls(platform, lambda call: [kept, 1.0], lambda call: [jnp.arange(5.0), 1.0]) == set()


def test_what_lies_on_the_host_is_read_at_each_call():
    calls = differing_calls("gpu", lambda call: [jnp.ones(2), np.ones(2)], lambda call: [jnp.ones(2), np.zeros(2)])
    assert calls == set(range(1, CALLS + 1))
