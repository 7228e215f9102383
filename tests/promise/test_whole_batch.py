"""The promise of the whole batch: what looks at all rows trains as plain Keras does on them, with the same bits wherever its replicas run."""

from __future__ import annotations

import numpy as np
import pytest

from sizes import cases, mostly_slow
from trainings import on
from whole_batch_families import FAMILIES, measure, train

CLOSE = 2e-6
"""Of the change of a group of variables, by its norm, and of logs."""
DEVICES = cases((1, 8), (1, 2, 4, 8))
QUICK = ("simclr", "two towers", "moco", "gan", "pairs of neighbours", "counts by rejection")


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *QUICK))
def test_a_family_trains_as_keras_on_the_whole_batch_with_the_same_bits_everywhere(name):
    wanted = train(FAMILIES[name])
    ours, *others = [train(FAMILIES[name], on(devices)) for devices in DEVICES]
    errors = measure(ours, wanted)
    assert max(errors.values()) < CLOSE, errors
    assert ours.run.logs.keys() == wanted.run.logs.keys()
    for log, values in wanted.run.logs.items():
        np.testing.assert_allclose(ours.run.logs[log], values, rtol=CLOSE, err_msg=log)
    for other in others:
        assert other.run.bits == ours.run.bits
