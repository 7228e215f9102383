"""The audit finds planted faults with cause, layer and line, and says nothing of their twins or of the examples."""

from __future__ import annotations

import html
import json
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from planted_faults import FAULTS, FOLDER, Pair, PlantedFault
from processes import environment
from sizes import thorough
from unisono._src.tools.cli import main
from unisono._src.tools.records import read_run_record

LIMIT = 900.0
ROOT = pathlib.Path(__file__).parents[3]
PLACEMENTS = {
    Pair.REPEAT: ["--devices", "2"],
    Pair.DEVICES: ["--devices", "1"],
    Pair.PROCESSES: ["--devices", "1", "--processes", "2"],
}
QUICK = (14,)
"""Numbers of the faults that the quick form tries."""


class Audited(NamedTuple):
    code: int
    report: dict[str, Any]
    text: str


def audit(folder: pathlib.Path, *words: str) -> Audited:
    """Run the command, and return its exit code, its report and what it printed. Its records and its page are in the folder too."""
    report = folder / "report.json"
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    files = ["--json", str(report), "--html", str(folder / "report.html"), "--keep", str(folder / "records")]
    command = [sys.executable, "-m", "unisono", "audit", *files, *words]
    variables = environment(JAX_PLATFORMS="cpu", TMPDIR=str(temporary))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False)
    return Audited(done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr)


@pytest.fixture
def audit_here(monkeypatch, capsys):
    """The command in this process, and its runs in processes of their own: what it says of a script does not depend on where it runs."""

    def run(*words: str) -> Audited:
        for name, text in environment(JAX_PLATFORMS="cpu").items():
            monkeypatch.setenv(name, text)
        with pytest.raises(SystemExit) as ended:
            main(["audit", *words])
        return Audited(int(str(ended.value.code)), {}, "".join(capsys.readouterr()))

    return run


def mark_faults() -> list[Any]:
    """Return the faults as parameters. An audit takes half a minute."""
    quick = [fault for fault in FAULTS if fault.number in QUICK]
    return [*quick, *thorough(*(fault for fault in FAULTS if fault not in quick))]


@pytest.mark.processes
@pytest.mark.parametrize("fault", mark_faults(), ids=lambda fault: fault.name)
def test_a_fault_is_found_with_cause_and_place(fault, tmp_path):
    script, line = fault.write_fault(tmp_path)
    audited = audit(tmp_path, *PLACEMENTS[fault.pair], str(script))
    assert audited.code == 1, audited.text
    check_report(fault, line, audited)
    check_files(tmp_path, audited.report)


def check_report(fault: PlantedFault, line: int | None, audited: Audited) -> None:
    """Check what the audit says against the index."""
    found = audited.report["difference"]
    assert [found[name] for name in ("cause", "kind", "step", "layer")] == [fault.cause, fault.kind, fault.step, fault.layer]
    assert (found["source"] or {}).get("line") == line, found["source"]
    assert fault.said in " ".join(audited.text.split())
    assert "Instead: " in audited.text


def check_files(folder: pathlib.Path, report: dict[str, Any]) -> None:
    """Check that the page is there, and a record for each run."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") > 0
    for number, run in enumerate(report["runs"]):
        assert html.escape(run["name"]) in page
        if run["steps"]:
            assert len(read_run_record(folder / "records" / f"run-{number}" / "process-0").steps) >= run["steps"]


@pytest.mark.processes
@pytest.mark.parametrize("fault", thorough(*FAULTS), ids=lambda fault: fault.name)
def test_the_twin_of_a_fault_is_none(fault, tmp_path):
    twin = audit(tmp_path, *PLACEMENTS[fault.pair], str(fault.write_twin(tmp_path)))
    assert twin.code == 0, twin.text
    assert twin.report["warnings"] == []


def test_each_script_is_in_the_index():
    assert [fault.name for fault in FAULTS] == sorted(path.stem for path in FOLDER.glob("train_*.py"))
    assert {fault.pair for fault in FAULTS} == set(Pair)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_the_worked_example_of_the_docs_is_found(tmp_path):
    page = (ROOT / "docs" / "two_runs_differ.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0])
    audited = audit(tmp_path, str(script))
    assert audited.code == 1, audited.text
    shown = page.partition("Not equal: ")[2].partition("```")[0].splitlines()
    fixed = [line.strip() for line in shown if "values:" not in line]
    said = audited.text.replace(f"{script}:", "train.py:")
    assert [line for line in fixed if line not in said] == []


RECORDED = """
import sys
import unisono as un
import keras
import numpy as np

strategy = un.MirroredStrategy(devices=2, replicas=4)
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, sys.argv[2], name="wide"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(float(sys.argv[1])), "mse")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("0.1", "relu"), "Equal: 2 runs with R = 4 have the same bits in their first 6 steps."),
        *thorough(
            (("0.2", "relu"), "part before the first step, in the state before the step. variable: sgd/learning_rate"),
            (("0.1", "tanh"), "in the gradient. layer: wide variable: sequential/wide/kernel, and 3 more equation: "),
        ),
    ],
)
def test_a_run_is_compared_with_a_recorded_run(tmp_path, words, said):
    """The script, or its arguments, are others than in the recorded run."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(RECORDED)
    command = [sys.executable, str(script), "0.1", "relu"]
    subprocess.run(
        command,
        env=environment(JAX_PLATFORMS="cpu", UNISONO_RECORD=str(run), UNISONO_RECORD_DETAILS="1"),
        timeout=LIMIT,
        check=True,
    )
    audited = audit(tmp_path, "--against", str(run), str(script), *words)
    assert audited.code == (0 if said.startswith("Equal") else 1), audited.text
    text = " ".join(audited.text.split())
    assert said in text
    assert audited.code == 0 or "The script or its data are other ones than in the recorded run" in text


SLEEPS = "import time\nprint('sleeps', flush=True)\ntime.sleep(600)"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('nothing')", "The script has trained no step that is recorded"),
        (
            "raise KeyError('not there')",
            "The script ended with exit code 1 as it is written, before anything was compared: .*KeyError: 'not there'",
        ),
        (
            SLEEPS,
            "as written: the script was killed after 2 seconds, the limit, in its step 1. Write --limit .* The run wrote: sleeps",
        ),
    ],
    ids=["trains nothing", "fails", "is slow"],
)
def test_what_cannot_be_compared_is_trouble_and_no_difference(tmp_path, audit_here, script, said):
    (tmp_path / "train.py").write_text(script)
    done = audit_here("--limit", "2" if script == SLEEPS else "60", str(tmp_path / "train.py"))
    assert done.code == 2, done.text
    assert re.search(said, " ".join(done.text.split()))


def test_records_that_are_there_are_not_mixed_with_others(tmp_path):
    (tmp_path / "records").mkdir()
    refused = audit(tmp_path, str(pathlib.Path(__file__)))
    assert refused.code == 2
    assert "records is there already. Name a directory that does not exist yet." in " ".join(refused.text.split())
