"""The full cross sees what is different, and its table says so. `make matrix` runs it in full."""

from __future__ import annotations

import pytest

import matrix
from matrix import Training, different, table

LAST = "evaluate and predict"


def trained(fingerprint: str, devices: int = 1, source: str = "arrays", replicas: int = 8, **options: str) -> Training:
    of = {"family": "several_outputs", "precision": "float32", "optimizer": "sgd"} | options
    return Training(**of, replicas=replicas, devices=devices, source=source, fingerprint=fingerprint)


SAME = [
    trained("a"),
    trained("a", devices=3),
    trained("a", devices=3, source="tf.data"),
    trained("b", source=LAST),
    trained("b", devices=3, source=LAST),
    trained("c", replicas=6),
    trained("d", precision="mixed_float16"),
    trained("e", optimizer="adam"),
]


def test_equal_fingerprints():
    """Other optimizers, precisions and R, and what is evaluated, have fingerprints of their own."""
    assert different(SAME) == []
    assert table(SAME).splitlines() == [
        "| layers | precision | R = 8 | R = 6 |",
        "| --- | --- | --- | --- |",
        "| several outputs | float32 | 6 of 6 | 1 of 1 |",
        "| several outputs | mixed_float16 | 1 of 1 | 0 of 0 |",
    ]


@pytest.mark.parametrize(
    "wrong", [trained("f", devices=8), trained("f", devices=3, source=LAST), trained("f", source="generator")]
)
def test_a_fingerprint_that_is_different(wrong):
    assert different([*SAME, wrong]) == [wrong]
    assert "| several outputs | float32 | 6 of 7 |" in table([*SAME, wrong])


@pytest.mark.slow
@pytest.mark.matrix
def test_a_cell_of_the_matrix(tmp_path):
    """One family, precision and optimizer, on two placements, from every source of data."""
    found = matrix.train("several_outputs", "mixed_float16", ["adamw"], {6: [1, 4]})
    assert isinstance(found, list), found
    assert len(found) >= 2 * 4
    assert different(found) == []
    matrix.written(found, tmp_path)
    assert f"| several outputs | mixed_float16 | {len(found)} of {len(found)} |" in (tmp_path / "matrix.md").read_text()
    assert len((tmp_path / "matrix.csv").read_text().splitlines()) == 1 + len(found)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_family_that_fails_is_told():
    found = matrix.train("no such family", "float32", ["sgd"], {2: [1]})
    assert isinstance(found, matrix.Failed)
    assert "no such family" in found.why
