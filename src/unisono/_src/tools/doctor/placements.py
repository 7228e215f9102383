"""The self-test: one training on all placements of this machine. Fresh processes train, and the bits are compared."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from unisono._src.processes import names
from unisono._src.processes.environments.precedence import AGREEING_VARIABLES
from unisono._src.processes.launch.worker_environment import list_gpus
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict, read_finding
from unisono._src.tools.doctor.trainer import TrainedBits
from unisono._src.typing import Json

SECTION = "placements"
MODULE = "unisono._src.tools.doctor.trainer"
LIMIT = 300
"""Seconds that a process may take: on an idle machine with two cores it takes ten."""
LAST_LINES = 3
"""The number of last lines of a failed process' standard error that are shown."""

CLUSTER_VARIABLES = (*AGREEING_VARIABLES, "JAX_COORDINATOR_BIND_ADDRESS")
"""Variables that would connect a process of the self-test to the processes of a training."""

PARTING_ADVICE = (
    "a training on one placement alone, and a report of this fault of Unisono or of this machine, with all that stands here"
)
"""What to do about placements that part."""


class TrainerError(Exception):
    """A process of the self-test failed."""


def try_placements(with_processes: bool) -> tuple[list[Finding], list[dict[str, Json]]]:
    """Train on all placements, side by side, and compare the bits.

    The result has findings about devices and placements, and the bits of each placement.
    """
    commands = {
        "several devices": [sys.executable, "-m", MODULE, "counts"],
        "one device": [sys.executable, "-m", MODULE, "new-process"],
    }
    findings: list[Finding] = []
    if with_processes and len(list_gpus(os.environ)) != 1:
        launch = ["-m", "unisono", "launch", "--processes", "2", "--devices-per-process", "1"]
        commands["two processes"] = [sys.executable, *launch, "-m", MODULE, "cluster"]
    elif with_processes:
        findings.append(Finding(SECTION, "two processes", "not tried: they would share one GPU", PromiseVerdict.NOTE))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(run_trainer, command) for name, command in commands.items()}
    trained: list[dict[str, Json]] = []
    for name, job in jobs.items():
        try:
            record = job.result()
        except TrainerError as error:
            findings.append(Finding(SECTION, name, str(error), PromiseVerdict.UNSEEN))
            continue
        findings += map(read_finding, record.get("findings", []))
        trained += record["trained"]
    return [*findings, *compare_placements(trained)], trained


def run_trainer(command: Sequence[str]) -> dict[str, Json]:
    """Run a process of the self-test, and read its printed record."""
    try:
        done = subprocess.run(
            command, env=make_environment(os.environ), capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise TrainerError(f"the training did not end within {LIMIT} seconds") from None
    records = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"trained": [{' in line]
    if done.returncode or not records:
        last = " / ".join(line.strip() for line in done.stderr.strip().splitlines()[-LAST_LINES:])
        raise TrainerError(f"the training ended with exit code {done.returncode}: {last or 'without a word'}")
    return json.loads(records[-1])


def make_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a process of the self-test.

    It is the user's, without a cluster and without a cache of programs on disk. No process reserves the memory of a GPU in advance, so that
    several processes share one.
    """
    alone = {name: value for name, value in base.items() if name not in CLUSTER_VARIABLES}
    ours = {names.PROCESSES: "1", "JAX_ENABLE_COMPILATION_CACHE": "0", "KERAS_BACKEND": "jax"}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | alone | ours


def compare_placements(trained: Sequence[Mapping[str, Json]]) -> list[Finding]:
    """Make a finding for each placement.

    It has the placement's fingerprint, and the step at which it parts from the first placement.
    """
    placed = [TrainedBits(**record) for record in trained]
    return [compare_with_first(bits, placed[0]) for bits in placed]


def compare_with_first(bits: TrainedBits, first: TrainedBits) -> Finding:
    parting = bits.describe_parting(first)
    if parting:
        return Finding(SECTION, bits.placement, f"{bits.fingerprint} {parting}", PromiseVerdict.BREAKS, PARTING_ADVICE)
    return Finding(SECTION, bits.placement, bits.fingerprint)
