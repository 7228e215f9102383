"""What a replay refuses, and how it chooses its step, its program and its checkpoint."""

from __future__ import annotations

import math
import pathlib
import sys

import keras
import numpy as np
import pytest

import unisono as un
from storages import NAMES, list_names, storage, write
from unisono._src.keras.checkpoint.files import count_steps
from unisono._src.keras.checkpoint.store import CheckpointStore
from unisono._src.keras.record.run_recorder import RunRecorder
from unisono._src.processes import names
from unisono._src.tools.cli.replay_command import move_script_last
from unisono._src.tools.records import Program, RecordDifference, RecordedStep, RunRecord, Start, read_run_record
from unisono._src.tools.replay.replay import (
    ReplayError,
    ReplaySettings,
    choose_program,
    choose_step,
    compare_with_recorded,
    replay_script,
)
from unisono._src.tools.replay.step_inspector import ReplayInspector

PROGRAM = Program("train", [], 0, {"replicas": 2}, {})


def recorded(*losses):
    return {number: RecordedStep(number, PROGRAM, (0, number), 4, loss, (), ()) for number, loss in enumerate(losses)}


def settings(step=None, program=("train.py",), **more):
    return ReplaySettings(program, pathlib.Path("run"), step, **more)


def test_the_step_is_the_first_whose_loss_is_not_finite():
    assert choose_step(settings(), recorded(1.0, 2.0, math.inf, math.nan)) == 2
    assert choose_step(settings(), recorded(1.0, math.nan, math.inf)) == 1
    assert choose_step(settings(2), recorded(1.0, math.nan, math.inf)) == 1
    assert choose_step(settings(), recorded(None, 2.0, math.nan)) == 2


@pytest.mark.parametrize(
    ("step", "losses", "text"),
    [
        (None, (1.0, 2.0), "The steps that are recorded in 'run' have finite losses. Say which step to replay: --step N."),
        (
            None,
            (None, None),
            "The steps that are recorded in 'run' tell no loss. Say which step to replay: --step N.",
        ),
        (3, (1.0, 2.0), "The record in 'run' has steps 1 to 2, and --step is 3."),
        (1, (), "The record in 'run' has no steps."),
    ],
)
def test_a_step_that_was_not_recorded_is_refused(step, losses, text):
    with pytest.raises(ReplayError) as raised:
        choose_step(settings(step), recorded(*losses))
    assert str(raised.value) == text


def test_arguments_are_those_of_the_recorded_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").touch()
    record = RunRecord(tmp_path, [Start(0, ["train.py", "--rate", "1"], 0.0, {})])
    assert choose_program((), record) == ("train.py", "--rate", "1")
    assert choose_program(("train.py",), record) == ("train.py", "--rate", "1")
    assert choose_program(("-m", "train"), record) == ("-m", "train", "--rate", "1")
    assert choose_program(("train.py", "--rate", "2"), record) == ("train.py", "--rate", "2")
    with pytest.raises(ReplayError) as raised:
        choose_program(("gone.py",), record)
    assert str(raised.value).startswith("There is no script 'gone.py' here. Name the script of the recorded run")


@pytest.mark.parametrize(
    ("words", "arranged"),
    [
        ("train.py --run run --step 3", "--run run --step 3 -- train.py"),
        ("train.py --run run -- --rate 2", "--run run -- train.py --rate 2"),
        ("train.py --run run", "--run run -- train.py"),
        ("--run run train.py --rate 2", "--run run train.py --rate 2"),
    ],
)
def test_the_script_may_come_first(words, arranged):
    assert move_script_last(words.split()) == arranged.split()


def trained(directory):
    with un.OneDeviceStrategy(replicas=2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0, callbacks=[un.callbacks.Record(directory)])


def test_more_devices_than_replicas_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained("run")
    step = min(read_run_record("run").steps) + 1
    with pytest.raises(ReplayError) as raised:
        replay_script(settings(step, devices=3), tmp_path)
    assert str(raised.value) == "The recorded run has R = 2, and --devices is 3. Write at most 2."


def test_a_script_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained("run")
    step = min(read_run_record("run").steps) + 1
    pathlib.Path("train.py").write_text("raise SystemExit('no data here')")
    pathlib.Path("other.py").write_text("print('nothing to train')")
    for script, text in (
        ("train.py", f"ended with exit code 1 before step {step} was over:\n\nno data here"),
        ("other.py", f"ended by itself before step {step} was over:\n\nnothing to train"),
    ):
        folder = tmp_path / f"replay of {script}"
        folder.mkdir()
        with pytest.raises(ReplayError) as raised:
            replay_script(settings(step, program=(script,)), folder)
        assert str(raised.value) == f"The script {text}"


def test_a_record_of_the_scripts_own_is_left_alone(tmp_path, monkeypatch):
    """A tool that runs a script names a directory that takes the place of the script's."""
    other = RunRecorder(tmp_path / "instead", is_fixed=True)
    monkeypatch.setattr("unisono._src.keras.record.run_recorder._recorder", other)
    trained(tmp_path / "run")
    other.record_from_here(tmp_path / "run")
    other.close()
    assert not (tmp_path / "run").exists()
    assert len(read_run_record(tmp_path / "instead").steps) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_starts_from_a_checkpoint_before_its_step_and_writes_none(tmp_path, monkeypatch, name):
    def save(number, steps):
        store.save(number, lambda: ({"x": np.arange(3)}, {"steps": steps}))
        store.wait()

    def find_start(step):
        monkeypatch.setenv(names.REPLAY_STEP, str(step))
        loaded = store.load_newest()
        latest = un.latest_checkpoint(directory)
        assert latest == (loaded and str(loaded.path))
        return loaded and loaded.record["steps"]

    with storage(name, tmp_path) as directory:
        store = CheckpointStore(directory)
        for number, steps in enumerate((4, 8, 12)):
            save(number, steps)
        write(directory / "model.weights.h5", b"")  # it may be of any step
        assert [find_start(step) for step in (3, 4, 11, 12, 50)] == [None, 4, 8, 12, 12]
        save(9, 40)
        store.delete()
        assert list_names(directory) == ["ckpt_0", "ckpt_1", "ckpt_2", "model.weights.h5"]
        assert count_steps(directory / "gone_1") == math.inf


@pytest.mark.parametrize(("at", "step", "count"), [(5, 0, 5), (5, 3, 2), (5, 5, 0), (5, 6, sys.maxsize), (20, 0, 20)])
def test_steps_are_counted_to_the_one_that_is_inspected(at, step, count):
    assert ReplayInspector(at, "report").count_unwatched(step) == count


def test_steps_that_only_one_has_recorded_are_not_compared():
    """The record of one `fit` of several; a replay records all of them, from its checkpoint on."""
    whole = recorded(1.0, 2.0, 3.0, 4.0)
    assert compare_with_recorded({number: whole[number] for number in (2, 3)}, whole) is None
    other = whole | {3: whole[3]._replace(rows=5)}
    assert compare_with_recorded({2: whole[2], 3: whole[3]}, other) == RecordDifference(3, "rows", has_other_shapes=True)
