"""The comparison of fingerprints has teeth: each rule of the engine, broken on purpose, changes one."""

from __future__ import annotations

import keras
import pytest

import unisono as un
from breakages import BREAKAGES, sums_by_device
from families import BATCH, normalized
from sizes import mostly_slow


def trained(devices: int = 2) -> str:
    keras.utils.set_random_seed(0)
    with un.MirroredStrategy(devices=devices, replicas=8).scope():
        model, compile_, data = normalized()
    model.compile(**compile_)
    model.fit(**data, batch_size=BATCH, epochs=2, verbose=0)
    return un.fingerprint(model)


@pytest.fixture(scope="module")
def unbroken():
    return trained()


@pytest.mark.parametrize("name", mostly_slow(BREAKAGES, "tree_order"))
def test_a_broken_rule_changes_the_fingerprint(name, unbroken, monkeypatch):
    BREAKAGES[name](monkeypatch)
    assert trained() != unbroken


def test_sums_by_device_depend_on_the_placement(unbroken, monkeypatch):
    """What a naive engine does is seen by comparing two placements."""
    assert trained(3) == unbroken
    sums_by_device(monkeypatch)
    assert trained(2) != trained(3)
