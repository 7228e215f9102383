"""Machine code on disk: later processes load it, on other devices too, and train the same bits."""

from __future__ import annotations

import pathlib

import pytest

import kept_programs
from processes import python

SCRIPT = """
import sys
import unisono as un
from unisono._src.engine.xla import programs

made, compiled = [], programs.compile_lowered
programs.compile_lowered = lambda lowered, device: made.append(lowered) or compiled(lowered, device)
strategy = un.MirroredStrategy(devices=int(sys.argv[1]), replicas=4)

import keras
import numpy as np

keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(np.ones((10, 3)), np.ones((10, 2)), batch_size=8, verbose=0)
print(len(made), un.fingerprint(model))
"""


def trained(folder: pathlib.Path | None, devices: int = 1, least: float = 0.0, threads: int = 4) -> tuple[int, str]:
    """(programs that were compiled, the fingerprint)"""
    settings = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(least)}
    settings |= {"JAX_COMPILATION_CACHE_DIR": str(folder)} if folder else kept_programs.NOTHING_KEPT
    done = python("-W", "error::UserWarning", "-c", SCRIPT, str(devices), PJRT_NPROC=str(threads), **settings)
    assert done.returncode == 0, done.stderr[-2000:]
    made, bits = done.stdout.split()
    return int(made), bits


def ours(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("unisono-*-cache"))


@pytest.fixture(scope="module")
def fresh() -> tuple[int, str]:
    return trained(None)


@pytest.mark.processes
@pytest.mark.slow
def test_a_later_process_compiles_nothing_that_an_earlier_one_has(tmp_path):
    made, bits = trained(tmp_path)
    assert len(ours(tmp_path)) == made > 0
    assert trained(tmp_path) == (0, bits)


@pytest.mark.slow
def test_another_placement_compiles_nothing_but_what_adds_between_devices(tmp_path, fresh):
    assert trained(tmp_path) == fresh
    more = trained(None, devices=2)[0] - fresh[0]
    assert trained(tmp_path, devices=2) == (more, fresh[1])


@pytest.mark.slow
def test_code_for_other_threads_is_other_code(tmp_path, fresh):
    trained(tmp_path)
    assert trained(tmp_path, threads=3) == fresh


@pytest.mark.slow
def test_damaged_code_is_compiled_again(tmp_path, fresh):
    trained(tmp_path)
    before = {path: path.read_bytes() for path in ours(tmp_path)}
    cut, other, *_ = before
    cut.write_bytes(before[cut][:100])
    other.write_bytes(before[other][:-1] + bytes([before[other][-1] ^ 1]))
    assert trained(tmp_path) == (2, fresh[1])
    assert {path: len(path.read_bytes()) > 100 for path in ours(tmp_path)} == dict.fromkeys(before, True)
    assert trained(tmp_path) == (0, fresh[1])


@pytest.mark.slow
def test_what_is_compiled_in_no_time_is_not_kept(tmp_path, fresh):
    assert trained(tmp_path, least=60.0) == fresh
    assert not ours(tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_keeps_nobody_from_training(tmp_path, fresh):
    (tmp_path / "file").write_text("")
    done = python("-c", SCRIPT, "1", PJRT_NPROC="4", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "file" / "programs"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(fresh[0]), fresh[1]]
    assert f"Programs are not kept in {tmp_path}/file/programs: NotADirectoryError" in done.stderr
