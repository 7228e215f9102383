"""Records of whole programs that nobody changed: `UNISONO_RECORD`, kill -9, resumes on other placements, two processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from processes import HERE, LAUNCH, environment, kept_in, python
from sizes import thorough
from unisono._src.keras.record import record_file
from unisono._src.tools.records import RunRecord, read_run_record

pytestmark = pytest.mark.processes

SCRIPT = str(HERE / "train_and_be_killed.py")


def spec(directory, devices, how):
    return json.dumps({"directory": str(directory), "devices": devices, "how": how})


def content(record: RunRecord):
    return [
        (s.number, [(v.kind, v.shape) for v in s.program.variables], s.position, s.rows, repr(s.loss), s.row_digests, s.digests)
        for s in record.steps.values()
    ]


@pytest.mark.parametrize("how", thorough("fit", "loop"))
def test_a_run_that_is_killed_goes_on_with_its_record(tmp_path, how):
    whole, killed, kept = tmp_path / "whole", tmp_path / "killed", kept_in(tmp_path / "kept")
    done = python(SCRIPT, spec(tmp_path / "a", 1, how), UNISONO_RECORD=str(whole), **kept)
    assert done.returncode == 0, done.stderr[-3000:]
    for devices in (2, 3):
        command = [sys.executable, SCRIPT, spec(tmp_path / "b", devices, how)]
        options = environment(UNISONO_RECORD=str(killed), **kept)
        with subprocess.Popen(command, env=options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            before = size_of(killed)
            # Without a checkpoint the next run would begin the record anew: on a loaded machine a save takes its time.
            while process.poll() is None and (size_of(killed) < before + 4000 or not has_saved(tmp_path / "b")):
                time.sleep(0.01)
            process.kill()
            process.communicate()
    done = python(SCRIPT, spec(tmp_path / "b", 8, how), UNISONO_RECORD=str(killed), **kept)
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_run_record(killed)
    assert len(record.starts) == 3
    assert record.starts[-1].first > 0
    assert len(content(record)) == 69
    assert content(record) == content(read_run_record(whole))


KILLED = """
import os, signal, sys
os.chdir(sys.argv[3])
import unisono as un
import keras, numpy as np
from unisono._src.keras.checkpoint import files
from unisono._src.keras.record import run_recorder

if sys.argv[1] == "late":  # nothing is written before it must be, and the process is killed as soon as its second checkpoint is there
    run_recorder.SECONDS, run_recorder.MOST_WAITING = 1e6, 10**6
    save, saved = files.write_checkpoint, []
    def save_and_be_killed(path, *args):
        save(path, *args)
        saved.append(path)
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    files.write_checkpoint = save_and_be_killed

strategy = un.MirroredStrategy(devices=1, replicas=2)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1)
x, y = np.random.default_rng(0).random((60, 4), "float32"), np.ones((60, 2), "float32")
if sys.argv[2] == "fit":
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[un.callbacks.BackupAndRestore("saved", save_freq=5)])
else:
    checkpoint = un.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.restore(un.latest_checkpoint("saved"))

    def replica_step(batch):
        x, y = batch
        def loss():
            return un.compute_average_loss(keras.losses.mean_squared_error(y, model(x)))
        value, gradients = un.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    steps = list(strategy.distribute_dataset((x, y), batch_size=4))
    for number in range(int(optimizer.iterations), 30):
        strategy.run(replica_step, args=(steps[number % 15],))
        if number % 5 == 4:
            checkpoint.save("saved/")
"""


@pytest.mark.parametrize("how", thorough("fit", "loop"))
def test_a_run_that_is_killed_right_after_a_checkpoint_has_the_steps_before_it(tmp_path, how):
    records = {}
    for run, ways in {"killed": ("late", "once"), "whole": ("once",)}.items():
        directory = tmp_path / run
        directory.mkdir()
        for way in ways:
            done = python("-c", KILLED, way, how, str(directory), UNISONO_RECORD=str(directory / "record"))
            assert done.returncode == (-9 if way == "late" else 0), done.stderr[-3000:]
        records[run] = read_run_record(directory / "record")
    assert [start.first for start in records["killed"].starts] == [0, 10]
    assert len(content(records["killed"])) == 30
    assert content(records["killed"]) == content(records["whole"])


def has_saved(directory) -> bool:
    """Return whether there is a checkpoint that is written to its end."""
    return any(path.suffix == "" for path in directory.glob("ckpt_*"))


def size_of(directory) -> int:
    path = directory / record_file.NAME
    return path.stat().st_size if path.exists() else 0


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_record_once(tmp_path):
    """What one process records of the same steps, the rows of the other process included."""
    done = python(SCRIPT, spec(tmp_path / "a", 1, "fit"), UNISONO_RECORD=str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr[-3000:]
    launch = [*LAUNCH[1:], "--processes", "2", "--devices-per-process", "1", "--cpu", SCRIPT, spec(tmp_path / "b", "all", "fit")]
    done = python(*launch, UNISONO_RECORD=str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-3000:]
    two = read_run_record(tmp_path / "two")
    placement = next(iter(two.steps.values())).program.placement
    assert (placement["devices"], placement["processes"], placement["strategy"]) == (1, 2, "MultiWorkerMirroredStrategy")
    assert content(two) == content(read_run_record(tmp_path / "one"))


TRAIN = """
import unisono as un
import keras, numpy as np
strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(np.ones((32, 4), "float32"), np.ones((32, 2), "float32"), batch_size=8, epochs=5, verbose=0)
print("the end of the script")
"""


def test_a_run_ends_after_the_steps_that_the_environment_asks_for(tmp_path):
    done = python("-c", TRAIN, UNISONO_RECORD=str(tmp_path), UNISONO_STEPS="3", UNISONO_RECORD_EACH_PROCESS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the end of the script" not in done.stdout
    assert list(read_run_record(tmp_path / "process-0").steps) == [0, 1, 2]
