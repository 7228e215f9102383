"""Writes the fingerprints of the reference trainings under the conditions of this machine.

python tests/helpers/record_references.py            adds an entry, or says that the one that is kept is equal
python tests/helpers/record_references.py --moved    for a change of the engine that moves bits: drops all entries, which are of other bits, and
                                             raises the number of the engine's bits. Name the number in CHANGELOG.md.

Run it once for each pair of versions, with and without UNISONO_NATIVE=0.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

os.environ.setdefault("KERAS_BACKEND", "jax")

from unisono._src.engine.xla.device_kind import describe_processor, has_native_kernels
from unisono._src.kernels.native.library import load_kernels
from unisono._src.tools.doctor.references import FILE, LIBRARIES, Conditions, Reference, References, read_references
from unisono._src.versions import list_versions

TRAININGS = pathlib.Path(__file__).parent / "reference_trainings.py"
PLACEMENTS = (1, 4)
MOVED = "--moved"
NO_SETTINGS = ("XLA_FLAGS", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
"""Variables that the trainings run without."""


def describe_conditions() -> Conditions:
    """Return the conditions of this machine."""
    kernels = "native" if has_native_kernels({"kernels": load_kernels().description}) else "XLA's"
    versions = list_versions()
    return Conditions(**{name: versions[name] for name in LIBRARIES}, kernels=kernels, **describe_processor())


def train_references(names: tuple[str, ...] = (), placements: tuple[int, ...] = PLACEMENTS) -> dict[str, list[str]]:
    """Return the fingerprints of trainings in a fresh process, by name: one for each placement, which is a number of devices."""
    environment = {name: value for name, value in os.environ.items() if name not in NO_SETTINGS}
    done = subprocess.run(
        [sys.executable, str(TRAININGS), json.dumps(placements), *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def take_common(fingerprints: dict[str, list[str]]) -> dict[str, str]:
    """Return the fingerprint that all placements have, by name. Refuse placements that part."""
    parted = {name: prints for name, prints in fingerprints.items() if len(set(prints)) > 1}
    if parted:
        raise AssertionError(f"placements on {PLACEMENTS} devices part: {parted}")
    return {name: prints[0] for name, prints in fingerprints.items()}


def record(references: References, new: Reference, moved: bool) -> References:
    """Return the references with a new one. Refuse another value for one that is kept, unless the bits were moved on purpose."""
    if moved:
        return References(references.bits + 1, [new])
    kept = references.find(new.conditions)
    if kept is not None and kept.fingerprints != new.fingerprints:
        raise ValueError(say_moved(kept.fingerprints, new.fingerprints))
    return references.replace(new)


def say_moved(kept: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return what to do about fingerprints that are not those that are kept."""
    names = ", ".join(name for name in new if kept.get(name) != new[name])
    return (
        f"The engine's bits have moved, in: {names}. If a change is meant to do this, say so in CHANGELOG.md and record anew: "
        f"python tests/helpers/record_references.py {MOVED}. Otherwise the change is wrong."
    )


if __name__ == "__main__":
    before = read_references() if FILE.exists() else References(1, [])
    new = Reference(describe_conditions(), load_kernels().build, take_common(train_references()))
    after = record(before, new, MOVED in sys.argv)
    FILE.write_text(after.to_json() + "\n")
    print(f"bits {after.bits}, {len(after.entries)} entries: {FILE}")
