"""A traced script runs as it does without a trace, and its training is noted."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from processes import environment
from unisono._src.audit.script_run import TRACER

DESCRIBE_PYTHON = """
import json, sys
import line_trace, script_trace

json.dump({
    "words": sys.argv, "path": sys.path, "name": __name__, "own": [line_trace.OWN, script_trace.OWN],
    "modules": sorted(
        {name.partition(".")[0] for name in sys.modules if not name.startswith("_sysconfigdata")} - set(sys.stdlib_module_names)
    ),
}, sys.stdout)
"""
TRAIN = """
import numpy as np
import keras
import unisono as un

keras.utils.set_random_seed(0)
with un.OneDeviceStrategy(replicas=2).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])  # makes
    model.compile(optimizer="sgd", loss="mse")
x = np.arange(24, dtype="float32").reshape(8, 3) / 24
model.evaluate(x, x[:, :2], batch_size=4, verbose=0)
model.optimizer.learning_rate = 0.5  # sets
model.fit(x, x[:, :2], batch_size=4, epochs=1, shuffle=False, verbose=0)  # calls
np.savez("left.npz", *model.get_weights())
"""


def run_script(words: list[str], folder: pathlib.Path) -> str:
    """Run Python with some words, and return what it printed."""
    command = [sys.executable, *words]
    done = subprocess.run(
        command, env=environment(JAX_PLATFORMS="cpu"), capture_output=True, text=True, timeout=120, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", [["described.py"], ["-m", "described"]], ids=["script", "module"])
def test_a_script_finds_the_python_that_it_finds_without_a_trace(tmp_path, program):
    """Modules of the script's own that are named as ours are its own."""
    (tmp_path / "described.py").write_text(DESCRIBE_PYTHON)
    for name in ("line_trace", "script_trace"):
        (tmp_path / f"{name}.py").write_text("OWN = 1\n")
    plain = json.loads(run_script([*program, "--epochs", "2"], tmp_path))
    assert json.loads(run_script([TRACER, str(tmp_path), *program, "--epochs", "2"], tmp_path)) == plain
    assert plain["own"] == [1, 1]


def test_a_script_in_a_folder_named_unisono_is_the_users(tmp_path):
    """A checkout of the project has examples in such a folder."""
    script = tmp_path / "unisono" / "train.py"
    script.parent.mkdir()
    script.write_text("rate = 0.5\n")
    run_script([TRACER, str(tmp_path), str(script)], tmp_path)
    lines = json.loads((tmp_path / "trace-0.json").read_text())["lines"]
    assert str(script) in {line["place"][0] for line in lines}


@pytest.mark.processes
def test_a_training_is_noted_with_its_lines_rows_and_weights(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    run_script([TRACER, str(tmp_path), str(script)], tmp_path)
    content = json.loads((tmp_path / "trace-0.json").read_text())
    lines = {
        mark: number
        for number, text in enumerate(TRAIN.splitlines(), 1)
        for mark in ("makes", "sets", "calls")
        if f"# {mark}" in text
    }

    made = [event["places"][0][1] for event in content["variables"] if event["path"].endswith("head/kernel")]
    assert made[0] == lines["makes"]
    assigned = [(event["path"], event["places"][0][1]) for event in content["variables"] if event["action"] == "assigned"]
    # Neither what the trace of a step assigns nor what is written back after it.
    assert [(path, line) for path, line in assigned if not path.startswith("loss/")] == [("sgd/learning_rate", lines["sets"])]
    assert {places[0][1] for places in content["calls"].values()} == {lines["calls"]}
    assert [[len(shard) for shard in step] for step in content["rows"]] == [[2, 2], [2, 2]]
    assert len({row for step in content["rows"] for shard in step for row in shard}) == 8
    assert [layer["name"] for layer in content["layers"] if layer["name"] == "head"] == ["head"]
    primitives = {equation["primitive"] for program in content["programs"] for equation in program["equations"]}
    assert "dot_general" in primitives

    left = np.load(tmp_path / "left.npz")
    noted = np.load(tmp_path / "weights-0.npz")
    assert [name.rpartition("|")[2] for name in noted.files] == ["kernel", "bias"]
    for one, other in zip(left.files, noted.files, strict=True):
        np.testing.assert_array_equal(left[one], noted[other])
