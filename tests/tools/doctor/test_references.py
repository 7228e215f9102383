"""The kept fingerprints of twelve small trainings: a change of the engine that moves bits is noticed, and said in the changelog."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

import record_references
from processes import HERE, python
from record_references import record, say_moved, take_common, train_references
from reference_trainings import TRAININGS
from sizes import thorough
from unisono._src.kernels.native.library import load_kernels
from unisono._src.tools.doctor import references
from unisono._src.tools.doctor.references import Conditions, Reference, References, format_versions, read_references

CHANGELOG = HERE.parents[1] / "CHANGELOG.md"
QUICK = "convolution", "lstm", "attention", "mixed bfloat16", "custom loop", "clipping"
GROUPS = {"quick": QUICK, "other": tuple(name for name in TRAININGS if name not in QUICK)}

HERE_AND_NOW = Conditions("3.15.1", "0.10.2", "0.10.2", "native", "A 1", "avx2 avx512f", "32K 1024K")


@pytest.fixture(scope="module")
def kept() -> Reference:
    """Return the reference of this machine. A skip here comes before the trainings."""
    reference = read_references().find(record_references.describe_conditions())
    if reference is None:
        pytest.skip("nothing is kept for these versions on this processor: python tests/helpers/record_references.py records it")
    return reference


@pytest.mark.processes
@pytest.mark.parametrize(("group", "devices"), [("quick", 1), *thorough(("quick", 4), ("other", 2))])
def test_the_trainings_have_the_bits_that_are_kept(kept, group, devices):
    found = take_common(train_references(GROUPS[group], (devices,)))
    assert found == {name: kept.fingerprints[name] for name in found}, say_moved(kept.fingerprints, found)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_a_training_has_the_same_bits_on_all_placements():
    """Also where nothing is kept."""
    assert list(take_common(train_references())) == list(TRAININGS)


def test_placements_that_part_are_not_recorded():
    assert take_common({"dense": ["a", "a"], "lstm": ["b", "b"]}) == {"dense": "a", "lstm": "b"}
    with pytest.raises(AssertionError, match=r"placements on \(1, 4\) devices part: \{'lstm': \['b', 'c'\]\}"):
        take_common({"dense": ["a", "a"], "lstm": ["b", "c"]})


LEVELS = ("convolution", "separable", "lstm", "attention")
"""Trainings that the native kernels change."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(load_kernels().level != "avx512", reason="needs native kernels of two levels")
def test_the_level_of_the_kernels_changes_no_bit(monkeypatch):
    """So it does not belong to the conditions under which fingerprints are kept."""
    widest = take_common(train_references(LEVELS))
    monkeypatch.setenv("UNISONO_NATIVE", "avx2")
    assert take_common(train_references(LEVELS)) == widest
    monkeypatch.setenv("UNISONO_NATIVE", "0")
    without = take_common(train_references(LEVELS))
    assert not any(without[name] == widest[name] for name in LEVELS)


def test_the_changelog_names_the_number_of_the_bits():
    kept = read_references()
    assert f"bits {kept.bits} of Unisono" in CHANGELOG.read_text()
    assert f"bits {kept.bits + 1} of Unisono" not in CHANGELOG.read_text()


def test_all_trainings_are_kept_under_conditions_that_stand_once():
    kept = read_references()
    assert all(list(entry.fingerprints) == list(TRAININGS) for entry in kept.entries)
    assert len({entry.conditions for entry in kept.entries}) == len(kept.entries)
    assert all(len(set(entry.fingerprints.values())) == len(TRAININGS) for entry in kept.entries)


def test_bits_that_moved_are_not_recorded_by_accident():
    before = References(1, [Reference(HERE_AND_NOW, "0123", {"dense": "a", "lstm": "b"})])
    moved = Reference(HERE_AND_NOW, "0123", {"dense": "a", "lstm": "c"})
    with pytest.raises(
        ValueError, match=r"The engine's bits have moved, in: lstm\. If a change is meant to do this, say so in CHANGELOG"
    ):
        record(before, moved, moved=False)
    assert record(before, moved, moved=True) == References(2, [moved])
    newer = Reference(dataclasses.replace(HERE_AND_NOW, jax="0.12.0"), "0123", {"dense": "a", "lstm": "c"})
    assert record(before, newer, moved=False).entries == [before.entries[0], newer]
    rebuilt = Reference(HERE_AND_NOW, "4567", {"dense": "a", "lstm": "b"})
    assert record(before, rebuilt, moved=False).entries == [rebuilt]


def test_references_survive_their_file(tmp_path: pathlib.Path):
    file = tmp_path / "references.json"
    file.write_text(read_references().to_json())
    assert read_references(file) == read_references()


def test_pairs_of_versions_with_the_same_bits_have_the_same_letter():
    def entry(keras: str, lstm: str, kernels: str = "native") -> Reference:
        conditions = dataclasses.replace(HERE_AND_NOW, keras=keras, kernels=kernels)
        return Reference(conditions, None, {"dense": "a", "lstm": lstm})

    kept = References(3, [entry("3.15.0", "b"), entry("3.15.1", "b"), entry("3.15.2", "c"), entry("3.15.1", "d", "XLA's")])
    assert format_versions(kept).splitlines() == [
        "Versions with the same bits: equal letters stand for equal fingerprints of 2 small trainings (bits 3 of Unisono).",
        "",
        "XLA's kernels on A 1 with AVX-512, caches 32K 1024K",
        "  keras     jax       bits",
        "  3.15.1    0.10.2    A",
        "",
        "native kernels on A 1 with AVX-512, caches 32K 1024K",
        "  keras     jax       bits",
        "  3.15.0    0.10.2    A",
        "  3.15.1    0.10.2    A",
        "  3.15.2    0.10.2    B  other than A in lstm",
    ]


@pytest.mark.processes
def test_the_table_is_printed_from_an_installation(tmp_path):
    done = python("-m", "unisono", "doctor", "--versions")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == format_versions(read_references())
    assert json.loads(python("-m", "unisono", "doctor", "--versions", "--json").stdout)["bits"] == read_references().bits
    refused = python("-m", "unisono", "doctor", "--versions", "--processes")
    assert refused.returncode == 2
    assert "--versions prints a table that is kept, and looks at no process." in refused.stderr
    assert references.FILE.parent.name == "doctor"
