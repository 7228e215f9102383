"""What one kind of device is, and who says that two are of different kinds."""

from __future__ import annotations

import re
import warnings

import keras
import pytest
from keras import layers

import unisono as un
from unisono._src.engine.xla import device_kind
from unisono._src.keras.checkpoint import run_description
from unisono._src.keras.strategy.multi_worker import warn_of_device_kinds
from unisono._src.kernels.native import library

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 151
model name\t: a name that says little
flags\t\t: fpu avx2 fma hypervisor
"""
BOARD = """Hardware\t: BCM2835
Revision\t: d03115
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this machine one of cores of which the kernel tells `told`, with these caches."""

    def of(told, *caches):
        (tmp_path / "cpuinfo").write_text("\n".join(told))
        for number, sizes in enumerate(caches):
            for index, (level, kind, size) in enumerate(sizes):
                folder = tmp_path / f"cpu/cpu{number}/cache/index{index}"
                folder.mkdir(parents=True)
                for name, value in (("level", level), ("type", kind), ("size", size)):
                    (folder / name).write_text(f"{value}\n")
        monkeypatch.setattr(library, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(device_kind, "CORES", tmp_path / "cpu")
        device_kind.describe_processor.cache_clear()
        return device_kind.describe_processor()

    yield of
    device_kind.describe_processor.cache_clear()


def test_a_processor_is_its_model_its_instructions_and_its_caches(machine):
    caches = [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1280K")]
    assert machine([X86, X86], caches, caches) == {
        "processor": "GenuineIntel 6 151",
        "instructions": "avx2 fma",
        "caches": "48K 1280K",
    }


def test_cores_that_are_not_alike_are_told(machine):
    found = machine([X86, X86], [(1, "Data", "48K")], [(1, "Data", "32K")])
    assert found["caches"] == "32K beside 48K"
    found = machine([ARM, ARM.replace("0xd40", "0xd41")])
    assert (found["processor"], found["instructions"]) == ("0x41 0xd40 beside 0x41 0xd41", "asimd bf16 fp")


def test_what_is_told_of_the_board_is_no_core(machine):
    """Else there would be no instructions that all cores have."""
    assert machine([ARM, ARM, BOARD])["instructions"] == "asimd bf16 fp"
    assert library.list_common_instructions() == {"fp", "asimd", "bf16"}


def test_a_system_that_tells_nothing_is_compared_by_what_python_knows(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(device_kind, "CORES", tmp_path / "none")
    device_kind.describe_processor.cache_clear()
    assert device_kind.describe_processor()["instructions"]
    assert device_kind.list_kind_differences(device_kind.describe_processor(), {"caches": "32K"}) == []


def other(**facts: str) -> dict[str, str]:
    return dict(un.OneDeviceStrategy().facts["device"]) | facts


def test_what_a_run_depends_on_has_a_fingerprint(monkeypatch):
    """Devices do not belong to it, their kind does."""
    one, eight = un.OneDeviceStrategy(replicas=8), un.MirroredStrategy(devices=8, replicas=8)
    alike = un.fingerprint(one.facts)
    assert un.fingerprint(eight.facts) == alike
    assert un.fingerprint(un.OneDeviceStrategy(replicas=4).facts) != alike
    there = other(caches="1K 2K")
    monkeypatch.setattr(device_kind, "describe_processor", lambda: there)
    assert un.fingerprint(one.facts) != alike


def test_a_checkpoint_of_another_kind_is_warned_about(tmp_path, monkeypatch):
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    checkpoint = un.Checkpoint(model=model)
    here = device_kind.describe_processor() | {"caches": "3K 4K"}  # a container may not tell its own
    with monkeypatch.context() as patch:
        patch.setattr(device_kind, "describe_processor", lambda: here | {"caches": "1K 2K", "instructions": "of_no_processor"})
        path = checkpoint.save(tmp_path / "ckpt")
        checkpoint.wait()
    monkeypatch.setattr(device_kind, "describe_processor", lambda: here)
    said = r"results may differ: caches: 1K 2K there, 3K 4K here; instructions: of_no_processor only there, .* only here"
    with pytest.warns(UserWarning, match=said):
        checkpoint.restore(path)


def test_a_checkpoint_that_knows_the_name_of_its_device_alone_is_restored():
    """As they were written before."""
    assert run_description.read_device_kind({"device": "cpu"}) == {"device": "cpu"}
    assert device_kind.list_kind_differences(run_description.read_device_kind({"device": "cpu"}), other()) == []


def test_processes_on_devices_of_different_kinds_are_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_device_kinds([other(), other(), other(caches="")])
    said = (
        "different kinds: caches: 1K in process 2, 2K in process 0; processor: B in process 2, A in process 0. The bits of this"
    )
    alike = other(caches="2K", processor="A")
    with pytest.warns(UserWarning, match=re.escape(said)):
        warn_of_device_kinds([alike, alike, other(caches="1K", processor="B")])
