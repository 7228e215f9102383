"""The rate of operations alone: in Unisono's kernels, in XLA without them, and in torch, beside the most that the cores can do.

python benchmarks/kernels.py [PART OF A NAME ...]

Prints GFLOP/s of the forward pass and of the gradients of each operation of `kernel_cases.py`. The peak is that of fused multiply-adds in
registers (`peak.cc`, where there is a C++ compiler).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cores
import results
from kernel_cases import CASES, SQUARE, WHOLE, Case
from timing import time_call

HERE = Path(__file__).parent
KERNELS = "kernels"
XLA = "XLA without kernels"
TORCH = "torch"
WAYS = {
    KERNELS: ("kernels_by_jax.py", {}),
    XLA: ("kernels_by_jax.py", {"UNISONO_NATIVE": "0"}),
    TORCH: ("kernels_by_torch.py", {}),
}
PEAK = "the peak of the cores"
PRODUCT = f"a product of {SQUARE} x {SQUARE} matrices"

Seconds = dict[str, dict[str, float]]
"""Of each part of each operation."""


def measure_script(script: str, variables: dict[str, str], wanted: list[str]) -> Seconds:
    environment = os.environ | {"KERAS_BACKEND": "jax", "OPENBLAS_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, str(HERE / script), *wanted], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_peak() -> float | None:
    """Return the GFLOP/s of multiply-adds in registers on all cores, or None where there is no compiler."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/peak"
        options = ["-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
        subprocess.run([compiler, *options, str(HERE / "peak.cc"), "-o", program], check=True)
        rates: list[float] = []

        def multiply() -> None:
            done = subprocess.run([program, str(os.cpu_count())], capture_output=True, text=True, check=True)
            rates.append(float(done.stdout))

        is_ready = cores.make_ready_check()
        for _ in range(1 if results.SMALL else 5):
            time_call(multiply, is_ready)
    return max(rates)


def list_rates(name: str, case: Case, measurements: dict[str, Seconds]) -> list[results.Row]:
    """Return the rates of each part, and of the parts that make a training step together."""
    rows = []
    for part in case.parts:
        rates = {f"{way}, GFLOP/s": case.flops_of(part) / seconds[name][part] / 1e9 for way, seconds in measurements.items()}
        rows.append({"operation": name, "part": part} | rates)
    flops = sum(case.flops_of(part) for part in case.together())
    together = {
        f"{way}, GFLOP/s": flops / sum(seconds[name][part] for part in case.together()) / 1e9
        for way, seconds in measurements.items()
    }
    return [*rows, {"operation": name, "part": "together"} | together] if case.parts != WHOLE else rows


def main() -> None:
    wanted = sys.argv[1:] or (["product 4096"] if results.SMALL else [])
    measurements = {way: measure_script(script, variables, wanted) for way, (script, variables) in WAYS.items()}
    rows = [row for name, case in CASES.items() if name in measurements[KERNELS] for row in list_rates(name, case, measurements)]
    most: list[results.Row] = [{"": PEAK, "GFLOP/s": rate} for rate in [measure_peak()] if rate]
    most += [
        {"": f"{PRODUCT}, {way}", "GFLOP/s": 2 * SQUARE**3 / seconds["square"]["forward"] / 1e9}
        for way, seconds in measurements.items()
    ]
    results.report_rows("peak", most)
    results.report_rows("kernels", rows)


if __name__ == "__main__":
    main()
