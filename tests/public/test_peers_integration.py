"""The comparison with others works where they are installed: `make compat`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from processes import HERE, python, user_python
from sizes import thorough

pytestmark = pytest.mark.compat

BENCHMARKS = HERE.parents[1] / "benchmarks"
WORKLOAD = "W3 MLP, batch 32"
SOME = ("torch DDP", "Unisono, default")


@pytest.mark.parametrize("names", thorough((SOME,), ((),)), ids=["some", "all"])
def test_contenders_are_compared_and_the_page_is_written(tmp_path, names):
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    small: dict[str, Any] = {"UNISONO_BENCHMARKS_SMALL": "1", "UNISONO_BENCHMARKS": str(tmp_path / "measured" / "this")}
    chosen = ["--contenders", *names] if names else []
    done = python(str(BENCHMARKS / "peers.py"), "--workloads", WORKLOAD, *chosen, **small)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "measured" / "this" / "peers.json").read_text())[WORKLOAD]
    assert len(found) == (len(names) or 11) + 1
    assert {name: one["seconds"] for name, one in found.items() if not isinstance(one["seconds"], float)} == {}
    pages = user_python(str(BENCHMARKS / "pages.py"), str(tmp_path))
    assert pages.returncode == 0, pages.stderr[-3000:]
    assert (tmp_path / "measured" / "this" / "peers.png").stat().st_size > 5_000
    assert "default to the best peer" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_operations_are_measured_alone_and_drawn(tmp_path):
    pytest.importorskip("torch")
    run = [str(BENCHMARKS / "run.py"), "--out", str(tmp_path), "--machine", "this", "--parts", "kernels"]
    done = python(*run, UNISONO_BENCHMARKS_SMALL="1")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "measured" / "this" / "kernels.json").read_text())
    assert [row["part"] for row in rows] == ["forward", "by the input", "by the kernel", "together"]
    assert all(rate > 0 for row in rows for rate in list(row.values())[2:])
    assert (tmp_path / "measured" / "this" / "kernels.png").stat().st_size > 5_000


SIZES = """
import json
import kernels_by_jax, kernels_by_torch
from kernel_cases import CASES

def size(result):
    gradients = [one for one in result if one is not None] if isinstance(result, tuple) else [result]
    return sorted(gradients[0].shape)

def sizes(case):
    ours = kernels_by_jax.list_calls(case)
    parts = [part for part in case.parts if part in ("forward", "by the kernel")]  # by the input, torch has the padded picture
    return [[size(way[part]()) for part in parts] for way in (ours, *kernels_by_torch.list_ways(case))]

print(json.dumps({name: sizes(case) for name, case in CASES.items() if "3 to 64" not in name}))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_an_operation_of_torch_is_the_one_that_is_measured_here():
    pytest.importorskip("torch")
    done = python("-c", SIZES, PYTHONPATH=str(BENCHMARKS))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 8
    assert {name: ways for name, ways in found.items() if any(way != ways[0] for way in ways)} == {}


COUNT = """
import json
import by_jax, by_torch, jax, keras
from workloads import WORKLOADS

def count(name):
    by_keras, _ = WORKLOADS[name].model(keras)
    parameters, _, _ = by_jax.MADE[name][0]()
    return [
        sum(variable.value.size for variable in by_keras.trainable_variables),
        sum(array.size for array in jax.tree.leaves(parameters)),
        sum(parameter.numel() for parameter in by_torch.make_model_and_optimizer(name)[0].parameters()),
    ]

print(json.dumps({name: count(name) for name in WORKLOADS if name.startswith(("W2", "W6", "W7"))}))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_convolutional_nets_by_hand_have_the_parameters_of_those_of_keras():
    pytest.importorskip("torch")
    done = python("-c", COUNT, PYTHONPATH=str(BENCHMARKS))
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert len(counts) == 3
    for name, (ours, *others) in counts.items():
        assert others == [ours, ours], name
