"""Several processes, really launched: the bits of one."""

import functools
import json
import os
import re

import pytest

from processes import HERE, python

SCRIPT = str(HERE / "train_in_processes.py")


@functools.cache
def alone(spec):
    done = python(SCRIPT, spec)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def launched(processes, devices, spec):
    """What each process printed."""
    options = ["--processes", str(processes), "--devices-per-process", str(devices), "--cpu"]
    done = python("-m", "unisono.cli", "launch", *options, SCRIPT, spec)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [re.match(r"\[(\d)\] (\{.*)", line) for line in done.stdout.splitlines()]
    found = {int(line[1]): json.loads(line[2]) for line in lines if line}
    assert sorted(found) == list(range(processes))
    return list(found.values())


PLACEMENTS = [(2, 2)]
MORE = [(1, 4), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize(("processes", "devices"), [*PLACEMENTS, *(pytest.param(*one, marks=pytest.mark.full) for one in MORE)])
def test_fit_and_loop_have_the_bits_of_one_process(processes, devices):
    """Convolutions, batch statistics and dropout, eight replicas; the last batch has fewer rows than replicas. The first process has one
    core, the others have what there is."""
    spec = {"replicas": 8, "families": ["conv"], "loop": "normalized"}
    cores = [1] + [len(os.sched_getaffinity(0))] * (processes - 1)
    for found in launched(processes, devices, json.dumps(spec | {"cores": cores})):
        assert found == alone(json.dumps(spec))


def test_replicas_need_not_divide_and_every_process_starts_from_the_weights_of_the_first():
    """Five replicas on two processes; each draws weights of its own."""
    spec = {"replicas": 5, "loop": "dense"}
    for found in launched(2, 1, json.dumps(spec | {"other_weights": True})):
        assert found == alone(json.dumps(spec))


def test_processes_that_do_not_agree_stop_with_both_values(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport unisono as un\nun.MultiWorkerMirroredStrategy(replicas=4 + 2 * int(os.environ['UNISONO_PROCESS']))\n"
    )
    done = python("-m", "unisono.cli", "launch", "--processes", "2", "--cpu", str(script))
    assert done.returncode == 1
    assert "The processes do not agree on replicas: process 0 has 4, and process 1 has 6." in done.stderr


def test_a_process_that_is_killed_in_a_step_is_named():
    spec = json.dumps({"replicas": 4, "loop": "dense", "killed_after": 2})
    done = python("-m", "unisono.cli", "launch", "--processes", "2", "--cpu", "--bound", "20", SCRIPT, spec)
    assert done.returncode == 137
    assert re.search(r"process 1 \(pid \d+ on .*\) was killed after step \d", done.stderr)


def test_rows_that_differ_between_processes_are_found():
    done = python(
        "-m", "unisono.cli", "launch", "--processes", "2", "--cpu", SCRIPT, json.dumps({"replicas": 2, "shuffled": True})
    )
    assert done.returncode == 1
    assert re.search(r"Batch 0 of pass 0 has other rows in process 1 than in process 0 \(digests \w{8} and \w{8}\)", done.stderr)


def test_streams_of_other_lengths_are_found(tmp_path):
    """One process has come to the end of its epoch, the other has another batch: both wait, and nobody will come."""
    spec = json.dumps({"replicas": 2, "lengths": str(tmp_path / "backup")})
    done = python("-m", "unisono.cli", "launch", "--processes", "2", "--cpu", "--bound", "10", SCRIPT, spec)
    assert done.returncode in (70, 76)
    assert re.search(
        r"process 1 \(pid \d+ on .*\) waits for a sum after step 3, and process 0 \(.*\) waits to hear of .* after step 3: nobody will come. "
        r"Their data have other lengths",
        done.stderr,
    )


def test_one_process_writes_and_shows_and_all_stop_at_one_epoch(tmp_path):
    spec = json.dumps({"replicas": 4, "files": str(tmp_path)})
    done = python("-m", "unisono.cli", "launch", "--processes", "2", "--cpu", SCRIPT, spec)
    assert done.returncode == 0, done.stderr[-3000:]
    epochs = [json.loads(line[4:])["epochs"] for line in done.stdout.splitlines() if re.match(r"\[\d\] \{", line)]
    assert epochs == [epochs[0]] * 2
    assert 1 < epochs[0] < 5
    assert (tmp_path / "log.csv").read_text().count("\n") == 1 + epochs[0]
    assert len(list(tmp_path.glob("*.weights.h5"))) == epochs[0]
    assert {line[:3] for line in done.stdout.splitlines() if "Epoch" in line} == {"[0]"}
