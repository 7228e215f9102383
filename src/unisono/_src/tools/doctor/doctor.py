"""The examination of this machine, from first check to exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence

from unisono._src.tools.doctor import cluster, cores, installation, settings
from unisono._src.tools.doctor.finding import (
    Finding,
    compute_exit_code,
    format_findings,
    format_verdict,
    make_json_record,
    run_check,
)
from unisono._src.tools.doctor.placements import try_placements
from unisono._src.typing import Json

ALONE = Finding(
    "processes", "one process", "nothing to compare. Start `unisono doctor` by what starts your training to compare processes"
)

CHECKS = {
    ("versions", "libraries"): installation.examine_libraries,
    ("settings", "GPU flags"): settings.examine_gpu_flags,
    ("settings", "excess precision"): settings.examine_excess_precision,
    ("settings", "CPU threads"): settings.examine_threads,
    ("settings", "TensorFlow's switch"): settings.examine_tensorflow_switch,
    ("settings", "XLA_FLAGS"): settings.examine_other_flags,
    ("settings", "JAX"): settings.examine_jax_settings,
    ("processor", "cores"): cores.examine_cores,
    ("processor", "native kernels"): installation.examine_kernels,
}
"""The checks that run before JAX starts, by section and subject."""


def examine_machine(with_self_test: bool, with_processes: bool, in_cluster: bool, as_json: bool) -> int:
    """Examine this machine, and print the findings as they come.

    The result is the exit code.

    Args:
        with_self_test: Train on the placements of this machine.
        with_processes: Train on two processes over loopback as well.
        in_cluster: Meet the other processes of the cluster that JAX finds.
        as_json: Print one object at the end.
    """
    findings = [finding for place, check in CHECKS.items() for finding in run_check(*place, check)]
    if in_cluster or cluster.is_one_of_several():
        return examine_together(findings, with_self_test, as_json)
    findings.append(ALONE)
    if not as_json:
        print(format_findings(findings), flush=True)
    more, trained = try_placements(with_processes) if with_self_test else ([], [])
    if not as_json:
        print(format_findings(more))
    return print_conclusion([*findings, *more], trained, as_json)


def examine_together(findings: Sequence[Finding], with_self_test: bool, as_json: bool) -> int:
    """Examine all processes, and print in process 0. The result is the exit code."""
    agreement = cluster.meet_processes()
    findings = cluster.gather_findings(agreement, findings)
    more, trained = cluster.examine_processes(agreement, with_self_test)
    everything = [*findings, *more]
    if not agreement.is_first:
        return compute_exit_code(everything)
    if not as_json:
        print(format_findings(everything))
    return print_conclusion(everything, trained, as_json)


def print_conclusion(findings: Sequence[Finding], trained: Sequence[dict[str, Json]], as_json: bool) -> int:
    """Print the verdict, or everything as JSON. The result is the exit code."""
    print(json.dumps(make_json_record(findings, trained), indent=2) if as_json else format_verdict(findings))
    return compute_exit_code(findings)
