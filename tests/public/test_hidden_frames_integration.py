"""What processes print of an error."""

from __future__ import annotations

import subprocess

import pytest

from processes import LAUNCH, environment, python

pytestmark = pytest.mark.processes

PROGRAM = """
import unisono as un
import keras, numpy as np

strategy = un.MultiWorkerMirroredStrategy(devices=1, replicas=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with un.MultiWorkerMirroredStrategy(devices=1, replicas=3).scope():
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.lstrip())
    return str(path)


def test_a_program_prints_its_own_line_and_the_sentence(program):
    lines = python(program).stderr.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{program}", line 9, in <module>']
    assert lines[2].startswith("    model.fit(np.ones((8, 3))")
    assert lines[-1].startswith("ValueError: ")
    assert len(lines) <= 5  # Python 3.13 underlines the call


@pytest.mark.slow
def test_launched_processes_print_no_more(program):
    done = subprocess.run(
        [*LAUNCH, "--processes", "2", "--cpu", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    frames = [line.partition("File ")[2] for line in done.stderr.splitlines() if 'File "' in line]
    assert frames == [f'"{program}", line 9, in <module>'] * 3  # of each process, and again of the first failure
    assert len(done.stderr.splitlines()) <= 16, done.stderr
