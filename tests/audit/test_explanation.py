"""What an audit says where no line tells why two runs differ, and of runs that fail."""

from __future__ import annotations

import math
import pathlib

import pytest

from unisono._src.audit.cause import Cause
from unisono._src.audit.explanation import explain_failure, explain_without_line
from unisono._src.audit.record_comparison import RecordDifference
from unisono._src.audit.repeated_runs import has_bits_of_other
from unisono._src.audit.run_plan import RunPlan
from unisono._src.audit.script_run import FinishedRun, ScriptRunner
from unisono._src.record.run_record import Program, RecordedStep, RunRecord, Start


def finished(entry=((1, 1),), version="3.15.1", code: int | None = 0, rows=()):
    program = Program("train", [], 0, {"replicas": 2, "versions": {"keras": version}}, {})
    step = RecordedStep(0, program, (0, 0), 4, 1.0, rows, (), entry)
    record = RunRecord(pathlib.Path("run"), [Start(0, ["train.py"], 0.0, {0: step})])
    return FinishedRun(RunPlan("a run"), pathlib.Path("run"), code, math.nan, "", (record,))


def explain(one, other, kind="rows"):
    cause, words = explain_without_line(one, other, RecordDifference(0, kind))
    return cause, words.cause


def test_no_seed_is_seen_by_the_weights_also_where_rows_differ_first():
    said = "The weights start from other values in each run: no seed was set before the model was made."
    assert explain(finished(), finished(((2, 2),))) == (Cause.HOST_RANDOM, said)
    assert explain(finished(), finished(((2, 2),)), "entry") == (Cause.HOST_RANDOM, said)
    assert explain(finished(), finished())[0] is Cause.UNKNOWN


def test_a_recorded_run_with_the_same_facts_is_of_another_script():
    recorded = finished(code=None)
    assert explain(recorded, finished(), "gradient") == (
        Cause.UNKNOWN,
        "The script or its data are other ones than in the recorded run: the versions and the kernels are the same.",
    )
    cause, said = explain(recorded, finished(version="3.15.0"), "gradient")
    assert cause is Cause.VERSIONS
    assert said.endswith("versions.keras is '3.15.1' there and '3.15.0' here.")


def test_a_first_run_that_becomes_the_second_one_has_changed_something_that_lasts():
    first, second = finished((), rows=((1, 1),)), finished((), rows=((2, 2),))
    assert has_bits_of_other(first, second, [second])
    assert not has_bits_of_other(first, second, [first])
    assert not has_bits_of_other(
        finished((), code=None), second, [second]
    )  # a record that was made elsewhere, and is not repeated


@pytest.mark.parametrize("records", [(), finished().records])
def test_of_a_run_that_fails_for_another_reason_the_error_is_told(tmp_path, records):
    """A line that reads a file is not blamed, though the runs were equal until one failed."""
    script = tmp_path / "run.py"
    script.write_text("values = open(__file__).read()\n")
    output = "Traceback\nValueError: Write another strategy.\n"
    failed = FinishedRun(RunPlan("a run, again"), tmp_path / "run-1", 1, 1.0, output, records)
    runner = ScriptRunner((str(script),), 1, tmp_path)
    told = explain_failure(runner, finished(), failed, lambda line: None)
    assert told.cause is Cause.UNKNOWN
    assert told.cause_words == "'a run, again' ended with exit code 1: ValueError: Write another strategy."
    assert told.what_to_write == "Do what the error says; the audit knows no line that would explain it."
    assert told.source is None
