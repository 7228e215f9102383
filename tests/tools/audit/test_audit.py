"""The runs of an audit, and what it concludes from those that differ and those that do not: by records that are made by hand."""

from __future__ import annotations

import pathlib
from typing import Any, cast

import pytest

from unisono._src.tools.audit import audit
from unisono._src.tools.audit.audit_report import Cause, Place
from unisono._src.tools.audit.difference_place import measure_divergence
from unisono._src.tools.audit.explanation import choose_words
from unisono._src.tools.audit.script_run import FinishedRun, RunPlan, ScriptRunner
from unisono._src.tools.records import Program, RecordDifference, RecordedStep, RunRecord, Start, Variable

VARIABLES = [Variable("gradient", "net/wide/kernel", (3,)), Variable("optimizer", "sgd/learning_rate", ())]


def make_record(seed: Any = 0, version: str = "3.15.1", steps=range(2), replicas: int = 4) -> RunRecord:
    """Return a record whose gradients come from a seed."""
    facts = {"replicas": replicas, "versions": {"keras": version}}
    program = Program(
        "train", VARIABLES, 1, facts, {"devices": 2, "platform": "cpu", "strategy": "MultiWorkerMirroredStrategy", "available": 1}
    )
    taken = {n: RecordedStep(n, program, (0, n), 8, 0.5, ((n, 7),), ((hash(seed) % 97, n), (n, n))) for n in steps}
    return RunRecord(pathlib.Path("run"), [Start(0, ["train.py"], 0.0, taken)])


class Runner:
    """Runs a script that ends with an exit code, and whose gradients come from a seed, both made of the plan and the number of the run."""

    def __init__(self, seed, code=lambda plan, number: 0) -> None:
        self.seed = seed
        self.code = code
        self.names: list[str] = []

    def run_to_end(self, plan: RunPlan, label: str) -> FinishedRun:
        number = len(self.names)
        self.names.append(plan.name)
        records = tuple(make_record(self.seed(plan, number, process)) for process in range(plan.processes))
        code = self.code(plan, number)
        output = "Traceback\nValueError: Write another strategy.\n" if code else ""
        return FinishedRun(plan, pathlib.Path(label), code, 1.0, output, () if code else records)


def make_report(runner: Any, **settings: Any) -> Any:
    return audit.Audit(cast("ScriptRunner", runner), audit.AuditSettings(("train.py",), **settings), lambda _: None).make_report()


REPEATED = ["as written", "as written, again", "as written, once more"]
PLACED = ["as written", "as written, again", "1 device", "4 devices"]


@pytest.mark.parametrize(
    ("seed", "cause", "runs"),
    [
        (lambda plan, number, process: number, "each run", REPEATED),
        (lambda plan, number, process: plan.hash_seed, "hash order", REPEATED),
        (lambda plan, number, process: number > 0, "earlier run", REPEATED),
        (lambda plan, number, process: plan.devices == 4, "devices", PLACED),
        (lambda plan, number, process: process, "process", [*PLACED, "2 processes"]),
    ],
)
def test_the_cause_is_shown_by_the_runs_that_differ(seed, cause, runs):
    runner = Runner(seed)
    report = make_report(runner)
    assert (report.difference.cause, runner.names) == (cause, runs)
    assert not report.equal


def test_runs_that_do_not_differ_are_equal():
    runner = Runner(lambda plan, number, process: 0)
    assert make_report(runner, devices=(2, 3), processes=(4, 5)).equal
    assert runner.names == ["as written", "as written, again", "3 devices", "4 processes"]


@pytest.mark.parametrize(
    ("fails", "cause"),
    [
        (lambda plan, number: number > 0, "earlier run"),
        (lambda plan, number: number == 1, "hash order"),
        (lambda plan, number: plan.devices == 1, "devices"),
    ],
)
def test_of_a_run_that_fails_the_error_is_told(fails, cause):
    runner = Runner(lambda plan, number, process: 0, lambda plan, number: int(fails(plan, number)))
    found = make_report(runner).difference
    assert (found.kind, found.cause, found.what_to_write) == ("exit", cause, "Do what the error says.")
    assert found.cause_words.startswith(f"'{found.runs[1]}' ended with exit code 1: ValueError: Write another strategy. ")


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (
            make_record(steps=(2, 3)),
            r"The record in 'run' begins with step 3 of its process, and an audit compares from step 1 on",
        ),
        (make_record(steps=()), r"The record in 'run' has no steps"),
        (make_record(replicas=2), r"The recorded run has R = 2, and the script as it is written R = 4"),
    ],
)
def test_a_record_that_cannot_be_compared_is_refused(monkeypatch, recorded, said):
    """A process that trained before it was recorded has counted its steps."""
    monkeypatch.setattr(audit, "read_run_record", lambda _: recorded)
    with pytest.raises(audit.AuditError, match=said):
        make_report(Runner(lambda plan, number, process: 0), against=pathlib.Path("run"))


@pytest.mark.parametrize(
    ("recorded", "cause", "said"),
    [
        (make_record(1), "script", "The script or its data are other ones than in the recorded run"),
        (make_record(1, "3.15.0"), "versions", "versions.keras is '3.15.0' there and '3.15.1' here."),
    ],
)
def test_a_recorded_run_differs_by_its_facts_or_by_its_script(monkeypatch, recorded, cause, said):
    monkeypatch.setattr(audit, "read_run_record", lambda _: recorded)
    found = make_report(Runner(lambda plan, number, process: 0), against=pathlib.Path("run")).difference
    assert found.cause == cause
    assert said in found.cause_words


@pytest.mark.parametrize(
    ("cause", "kind", "place", "said"),
    [
        ("each run", "entry", Place("wide"), "Call keras.utils.set_random_seed(0) before the model is made"),
        ("each run", "entry", Place(), "Give each generator a seed"),
        ("each run", "gradient", Place(equation="random_seed(int32[]) -> key<fry>[]"), "Make self.seed_generator ="),
        ("each run", "gradient", Place(equation="pure_callback() -> float32[]"), "The step calls Python back"),
        ("each run", "gradient", Place(), "what differs is an argument of strategy.run, or what a device computes."),
        ("process", "rows", Place(), "Read all rows in every process"),
    ],
)
def test_what_to_write_depends_on_what_differs(cause, kind, place, said):
    record = make_record()._replace(details=[{}])
    run = FinishedRun(RunPlan("as written"), pathlib.Path("run"), 0, 1.0, "", (record,))
    words = choose_words(run, run, RecordDifference(0, kind), place, Cause(cause))
    assert said in " ".join(words)


def test_divergence_is_the_fraction_of_a_layer_by_step():
    divergence = measure_divergence(("one", "other"), make_record(), make_record(1))
    assert divergence.steps == (1, 2)
    assert dict(zip(divergence.layers, divergence.fractions, strict=True)) == {"net/wide": (1.0, 1.0), "optimizer": (0.0, 0.0)}
