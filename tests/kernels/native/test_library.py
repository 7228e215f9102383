"""Which kernels are loaded, and what is said where there are none."""

from __future__ import annotations

import pathlib
import re
import sys
from types import SimpleNamespace

import keras
import pytest

import unisono as un
from processes import HERE, python
from unisono._src.engine.xla import device_kind
from unisono._src.kernels.native import library
from unisono._src.kernels.native.library import Kernels, KernelsUnavailableError, choose_level, load_kernels

NATIVE = Kernels("avx2", "0123456789ab")
SWITCHED_OFF = Kernels(None, None, "UNISONO_NATIVE=0")
NOT_COMPILED = Kernels(None, None, "no C++ compiler was found")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of libraries, on a processor with AVX2 and without AVX-512."""
    monkeypatch.delenv("UNISONO_NATIVE", raising=False)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "REASON", tmp_path / "reason.txt")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 fma f16c bmi1 bmi2 movbe\n\nflags\t\t: fpu avx2 fma f16c bmi1 bmi2 movbe avx512f\n")
    monkeypatch.setattr(library, "CPUINFO", cpuinfo)
    return tmp_path


def compiled(folder: pathlib.Path, *levels: str) -> None:
    for level in levels:
        (folder / f"kernels-{level}.so").touch()


def test_the_best_level_of_all_cores_is_chosen(folder, monkeypatch):
    compiled(folder, "avx2", "avx512")
    assert choose_level() == "avx2"
    library.CPUINFO.write_text(f"flags : {' '.join(library.NEEDED['avx512'] + library.NEEDED['avx2'])}\n")
    assert choose_level() == "avx512"
    monkeypatch.setenv("UNISONO_NATIVE", "avx2")
    assert choose_level() == "avx2"


def test_without_kernels_the_reason_is_given(folder, monkeypatch):
    with pytest.raises(KernelsUnavailableError, match="they were not compiled for this platform"):
        choose_level()
    library.REASON.write_text("no C++ compiler was found\n")
    with pytest.raises(KernelsUnavailableError, match="no C\\+\\+ compiler was found"):
        choose_level()
    compiled(folder, "avx512")
    with pytest.raises(KernelsUnavailableError, match="this processor has the instructions of none of avx512"):
        choose_level()
    monkeypatch.setenv("UNISONO_NATIVE", "0")
    with pytest.raises(KernelsUnavailableError, match="UNISONO_NATIVE=0"):
        choose_level()


def test_a_level_that_is_not_there_is_refused(folder, monkeypatch):
    compiled(folder, "avx2", "avx512")
    monkeypatch.setenv("UNISONO_NATIVE", "avx512")
    with pytest.raises(ValueError, match=re.escape("UNISONO_NATIVE=avx512 cannot be used here; possible are 0, avx2.")):
        choose_level()
    monkeypatch.setenv("UNISONO_NATIVE", "yes")
    with pytest.raises(ValueError, match=re.escape("UNISONO_NATIVE=yes is none of 0, 1, avx512, avx2, neon.")):
        choose_level()


def test_the_kernels_in_use_can_be_printed():
    done = python(
        "-c",
        "import unisono; print(unisono.native); print(unisono.OneDeviceStrategy().facts['device']['kernels'])",
        UNISONO_NATIVE="0",
    )
    assert done.stdout.splitlines() == ["no native kernels: UNISONO_NATIVE=0", "XLA's"], done.stderr
    if load_kernels().level:
        assert str(un.native) == f"native kernels for {un.native.level}, build {un.native.build}"
        assert un.OneDeviceStrategy().facts["device"]["kernels"] == f"native {un.native.level}, build {un.native.build}"


def test_a_library_for_a_newer_interface_is_not_used(monkeypatch):
    newer = SimpleNamespace(unisono_ffi_major=lambda: 0, unisono_ffi_minor=lambda: 9)
    monkeypatch.setattr(library, "read_interface_version", lambda: (0, 3))
    with pytest.raises(KernelsUnavailableError, match=r"compiled for version 0\.9 of XLA's interface, and jaxlib has 0\.3"):
        library.register_library("avx2", newer)


def test_a_damaged_library_is_not_used(folder):
    compiled(folder, "avx2")
    with pytest.raises(KernelsUnavailableError, match="their library cannot be loaded: .*kernels-avx2.so"):
        library.load_library("avx2")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": "", "CXX": ""}, "no C++ compiler was found (c++, g++, clang++, or the one that CXX names)"),
        ({"CXX": "false"}, "/false --version failed:"),
    ],
)
def test_installing_without_a_compiler_leaves_the_reason(tmp_path, variables, reason):
    code = "import build, pathlib, sys; print(build.build_or_say_why(pathlib.Path(sys.argv[1])))"
    done = python("-c", code, str(tmp_path / "libraries"), PYTHONPATH=str(HERE.parents[1] / "native"), **variables)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    assert (tmp_path / "libraries/reason.txt").read_text().strip() == done.stdout.strip()


@pytest.fixture
def use(monkeypatch):
    def use_kernels(kernels):
        for module in (device_kind, sys.modules["unisono._src.keras.checkpoint.run_description"]):
            monkeypatch.setattr(module, "load_kernels", lambda: kernels)

    return use_kernels


def save_and_restore(use, folder, there, here):
    with un.OneDeviceStrategy(replicas=2).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    checkpoint = un.Checkpoint(model=model)
    use(there)
    path = checkpoint.save(folder / "ckpt")
    checkpoint.wait()
    use(here)
    checkpoint.restore(path)


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (
            SWITCHED_OFF,
            NATIVE,
            "of a run without native kernels, and this process computes with them (native avx2, build 0123456789ab): that is another run, with "
            "other bits. Start Python with UNISONO_NATIVE=0 to go on without them. Nothing was restored.",
        ),
        (
            NATIVE,
            SWITCHED_OFF,
            "of a run with native kernels (native avx2, build 0123456789ab), and UNISONO_NATIVE=0 switches them off here: that is another run, "
            "with other bits. Start Python without UNISONO_NATIVE. Nothing was restored.",
        ),
    ],
)
def test_a_run_goes_on_with_the_kernels_that_it_had(tmp_path, use, there, here, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        save_and_restore(use, tmp_path, there, here)


def test_where_there_are_no_kernels_a_run_with_them_goes_on_with_a_warning(tmp_path, use):
    """Nothing could be switched, and the weights must not be lost."""
    with pytest.warns(UserWarning, match="results may differ: kernels: native avx2, build 0123456789ab there, XLA's here"):
        save_and_restore(use, tmp_path, NATIVE, NOT_COMPILED)


def test_other_builds_are_warned_of(tmp_path, use):
    with pytest.warns(UserWarning, match="kernels: native avx2, build 0123456789ab there, native avx2, build ba9876543210 here"):
        save_and_restore(use, tmp_path, NATIVE, Kernels("avx2", "ba9876543210"))
