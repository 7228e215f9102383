"""The promise, in fresh processes: device counts do not change a bit. `make matrix` runs the full cross."""

from __future__ import annotations

import os

import pytest

from families import FAMILIES
from processes import train

FULL = os.environ.get("UNISONO_MATRIX") == "full"
ALL = list(FAMILIES)
CROSS = {8: (2, 3, 4, 8), 6: (2, 4, 6), 12: (2, 4, 6)}
"""For each R, the device counts that are compared with one device."""
COVERING = {
    (8, 2): [],
    (8, 3): [],
    (8, 4): [],
    (8, 8): ["conv"],
    (6, 2): ["lstm"],
    (6, 4): ["conv"],
    (6, 6): ["conv"],
    (12, 2): ["gru"],
    (12, 4): ["gru"],
    (12, 6): ["gru"],
}
"""A short form; tests in one process have the other families and device counts."""
PRECISIONS = {"mixed_bfloat16": ["attention"], "mixed_float16": ["gru"]}


@pytest.mark.matrix
@pytest.mark.slow  # CI has eight devices on loaded cores (test_soak) and other placements in one process
@pytest.mark.parametrize("replicas", [8, 6, 12])
def test_device_counts_do_not_change_a_bit(replicas):
    cases = {devices: ALL if FULL else COVERING[replicas, devices] for devices in CROSS[replicas]}
    needed = [name for name in ALL if any(name in names for names in cases.values())]
    one = train(1, replicas, needed)
    for name in needed:
        first, second = one[name]["epochs"]
        assert first != second, "nothing was trained"
    for devices, names in ((devices, names) for devices, names in cases.items() if names):
        many = train(devices, replicas, names)
        assert many == {name: one[name] for name in names}, f"{devices} devices"


@pytest.mark.matrix
@pytest.mark.slow  # CI compares placements in half precision in one process: test_precision
@pytest.mark.parametrize("policy", PRECISIONS)
def test_device_counts_do_not_change_a_bit_in_half_precision(policy):
    names = ALL if FULL else PRECISIONS[policy]
    one = train(1, 8, names, policy=policy)
    in_full = train(1, 8, names[:1])
    assert one[names[0]]["epochs"] != in_full[names[0]]["epochs"], "the policy changed nothing"
    for devices in CROSS[8] if FULL else (3,):
        assert train(devices, 8, names, policy=policy) == one, f"{devices} devices"
