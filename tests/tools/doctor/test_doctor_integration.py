"""`unisono doctor` as a user starts it: in processes of its own, on a machine that keeps the promise and on one that does not."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from kept_programs import NOTHING_KEPT
from processes import FOR_USERS, HERE, LAUNCH, python
from unisono._src.tools.doctor.placements import MODULE

SOURCE = str(HERE.parents[1] / "src")

FAULT = f"""
import sys
if {MODULE!r} in sys.orig_argv:
    import jax
    from unisono._src.engine.exchange import on_lead

    total = on_lead.LeadExchange.total

    def flip(self, finished, description):
        sums = total(self, finished, description)
        return jax.tree.map(lambda leaf: leaf.at[0].multiply(1 + 2**-20), sums) if len(finished[0].nodes) == 4 else sums

    on_lead.LeadExchange.total = flip
"""
"""A flipped bit in the sums of four devices, in the processes of the self-test."""

IN_ONE_PROCESS = """
import os
if os.environ["UNISONO_PROCESS"] == "1":
    os.environ["UNISONO_NATIVE"] = "0"
    os.environ["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX2"
from unisono._src.tools.cli import main
main(["doctor"])
"""


def doctor(*options: str, **environment: str):
    return python("-m", "unisono", "doctor", *options, **environment)


@pytest.mark.processes
def test_a_sound_machine_has_one_fingerprint_on_all_its_placements(tmp_path):
    cache = tmp_path / "cache"
    done = doctor("--json", JAX_COMPILATION_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert [one["placement"] for one in record["placements"]] == [
        "1 CPU device", "2 CPU devices", "4 CPU devices", "8 CPU devices", "1 CPU device, compiled in another process",
    ]  # fmt: skip
    assert len({tuple(one["steps"]) for one in record["placements"]}) == 1
    assert len(set(record["placements"][0]["steps"])) == 4
    assert {finding["verdict"] for finding in record["findings"]} <= {"ok", "note"}
    assert not cache.exists()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_a_placement_with_a_flipped_bit_is_found(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    done = doctor(PYTHONPATH=f"{tmp_path}:{SOURCE}")
    assert done.returncode == 1, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert words.count("parts at step") == 1
    assert re.search(r"breaks 4 CPU devices: [0-9a-f]{32} parts at step 1 of 4, in \S", words)
    assert done.stdout.splitlines()[-1] == "1 breaks the promise of the same bits here."


@pytest.mark.slow
@pytest.mark.processes
def test_where_jax_does_not_start_the_self_test_is_unseen():
    done = doctor(XLA_FLAGS="--xla_no_such_flag=1")
    assert done.returncode == 2, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert "unseen several devices: the training ended with exit code" in words
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in words
    assert "ok keras:" in words


@pytest.mark.processes
def test_settings_that_break_the_promise_are_found_without_training():
    done = doctor("--no-self-test", PJRT_NPROC="1")
    assert done.returncode == 1
    assert "write: PJRT_NPROC=2, or leave it out" in done.stdout
    assert "placements" not in done.stdout


def launch(*program: str, **environment: str):
    return python(*LAUNCH[1:], "--processes", "2", "--cpu", *program, **NOTHING_KEPT, **FOR_USERS, **environment)


@pytest.mark.processes
def test_processes_that_differ_are_told_before_they_train(tmp_path: pathlib.Path):
    program = tmp_path / "one_differs.py"
    program.write_text(IN_ONE_PROCESS)
    done = launch(str(program))
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line.removeprefix("[0]").strip() for line in done.stdout.splitlines()]
    assert any(line.startswith("breaks  XLA_FLAGS: --xla_cpu_max_isa=AVX2 in process 1, none in process 0") for line in lines)
    assert "note    self-test: not run: the processes differ" in lines
    assert any(line.startswith("note    XLA_FLAGS, process 1: --xla_cpu_max_isa=AVX2") for line in lines)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_processes_that_are_launched_have_one_fingerprint():
    done = launch("-m", "unisono", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    placed = [line.split() for line in done.stdout.splitlines() if "process" in line and line.split()[1:2] == ["ok"]]
    prints = {words[-1] for words in placed if len(words[-1]) == 32}
    assert len(prints) == 1
    assert "all processes, as process 1 has it: " + prints.pop() in done.stdout


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_over_loopback_are_a_placement():
    done = doctor("--processes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok      2 processes, 1 CPU device each: " in done.stdout
