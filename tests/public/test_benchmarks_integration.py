"""The benchmarks work; how fast things are, they say themselves."""

from __future__ import annotations

import json
import shutil

import pytest

from processes import HERE, kept_in
from processes import user_python as python

BENCHMARKS = HERE.parents[1] / "benchmarks"
PARTS = {
    "contract": ["contract"],
    "memory": ["memory"],
    "start": ["start"],
    "scaling": ["replicas", "one batch", "sizes"],
    "loop": ["loop"],
    "calls": ["calls"],
    "devices": ["devices"],
    "checkpoint": ["checkpoint"],
    "recording": ["recording"],
    "verification": ["verification"],
    "recovery": ["recovery"],
    "streams": ["streams"],
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_measures_and_its_page_is_written(tmp_path, part):
    small = {"UNISONO_BENCHMARKS_SMALL": "1"} | kept_in(tmp_path / "programs")
    done = python(str(BENCHMARKS / "run.py"), "--out", str(tmp_path), "--machine", "this", "--parts", part, **small)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "RESULTS.md").read_text()
    for name in PARTS[part]:
        rows = json.loads((tmp_path / "measured" / "this" / f"{name}.json").read_text())
        numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
        assert numbers
        assert f"| {' | '.join(dict.fromkeys(head for row in rows for head in row))} |" in page


@pytest.mark.slow
def test_the_benchmark_of_flags_on_a_gpu_runs_without_one(tmp_path):
    done = python(str(BENCHMARKS / "gpu.py"), "100", UNISONO_BENCHMARKS_SMALL="1", UNISONO_BENCHMARKS=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    prints = {row["contender"]: row["fingerprint"] for row in json.loads((tmp_path / "gpu.json").read_text())}
    assert len(prints) == 7
    assert prints["ours"] == prints["ours, again"] == prints["ours, no CUDA graphs"]


@pytest.mark.slow
def test_the_benchmark_of_predicted_memory_compares_what_is_held(tmp_path):
    small = {"UNISONO_BENCHMARKS_SMALL": "1", "UNISONO_BENCHMARKS": str(tmp_path)} | kept_in(tmp_path / "programs")
    done = python(str(BENCHMARKS / "predicted_memory.py"), "like GPT", **small)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "predicted memory.json").read_text())
    assert [row["R"] for row in rows] == [1, 2, 8]
    assert all(row["held, predicted"] == pytest.approx(row["held, measured"], rel=0.1) for row in rows)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_benchmark_of_several_gpus_runs_on_cpu_devices(tmp_path):
    out = tmp_path / "gpus.json"
    small = {"UNISONO_BENCHMARKS_SMALL": "1"} | kept_in(tmp_path / "programs")
    done = python(str(BENCHMARKS / "gpus.py"), "--cpu", "2", "--out", str(out), **small)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert [row["on"] for row in found["bits"]] == ["1 device", "2 devices", "2 processes"]
    assert set(found["same bits"].values()) == {"the same bits on 3 of 3 placements"}
    assert [row["on"] for row in found["times"]] == ["2 devices", "2 processes"]
    assert all(row["Unisono, ms"] > 0 for row in found["times"])


def test_what_fails_on_several_gpus_is_kept_as_text(tmp_path):
    out = tmp_path / "gpus.json"
    done = python(str(BENCHMARKS / "gpus.py"), "--cpu", "2", "--out", str(out), "--seconds", "0", UNISONO_BENCHMARKS_SMALL="1")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert {row["failed"] for row in found["bits"] + found["times"]} == {"not begun after 0 s"}
    assert set(found["same bits"].values()) == {"not run on 0 of 3 placements"}


def test_the_page_of_this_project_is_of_what_was_measured(tmp_path):
    shutil.copytree(BENCHMARKS / "measured", tmp_path / "measured")
    done = python(str(BENCHMARKS / "pages.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "RESULTS.md").read_text()
    assert page == (BENCHMARKS / "RESULTS.md").read_text()
    assert "| R = 2 on 2 devices, ms |" in page
    processors = [json.loads(path.read_text())["processor"] for path in (BENCHMARKS / "measured").glob("*/machine.json")]
    assert len(processors) > 1
    assert [processor for processor in processors if f"- processor: {processor}\n" not in page] == []


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path):
    earlier = BENCHMARKS / "measured" / "intel-xeon-before-kernels"
    shutil.copytree(earlier, tmp_path / "measured" / "this", ignore=shutil.ignore_patterns("loop.json"))
    measured = tmp_path / "measured" / "this"
    missing = [part for part, names in PARTS.items() if not (measured / f"{names[-1]}.json").exists()]
    goes_on = [str(BENCHMARKS / "run.py"), "--out", str(tmp_path), "--machine", "this", "--missing", "--parts", *PARTS]
    done = python(*goes_on, UNISONO_BENCHMARKS_SMALL="1", **kept_in(tmp_path / "programs"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("##")] == [f"## {part}" for part in missing]
    assert "loop" in missing
    assert len(missing) < len(PARTS)
    assert (measured / "memory.json").read_text() == (earlier / "memory.json").read_text()


@pytest.mark.parametrize("script", ["grid.py", "floor.py", "peers.py", "devices.py"])
def test_what_is_said_of_settings_and_of_operations_holds(script):
    done = python("-m", "doctest", str(BENCHMARKS / script))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_operations_are_told_with_their_rates():
    done = python(str(BENCHMARKS / "operations.py"), "W3 MLP, batch 32", UNISONO_BENCHMARKS_SMALL="1")
    assert done.returncode == 0, done.stderr[-3000:]
    (forward,) = [line.split(" | ") for line in done.stdout.splitlines() if "dot [32, 784] x [784, 128]" in line]
    assert (float(forward[1]), forward[3]) == (1, "product")
    assert float(forward[2]) > 0


@pytest.mark.slow
def test_the_forms_of_the_cifar_net_are_compared(tmp_path):
    compare = [str(BENCHMARKS / "peers.py"), "--workloads", "W2 separable", "--contenders", "Keras on JAX", "Unisono, default"]
    done = python(*compare, UNISONO_BENCHMARKS_SMALL="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "failed" not in done.stdout
