"""Findings about the processes of one training. The facts that differ between them, and the self-test over all of them."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence

from unisono._src.engine.xla import device_kind, runtime
from unisono._src.processes.agreement import Agreement, begin_agreement
from unisono._src.processes.environments.connect import connect_processes
from unisono._src.processes.environments.precedence import describe_by_first
from unisono._src.processes.watch.begin import begin_watch
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict, read_finding
from unisono._src.tools.doctor.installation import describe_kernels
from unisono._src.tools.doctor.placements import compare_placements
from unisono._src.typing import Json
from unisono._src.versions import list_versions

SECTION = "processes"
PLACES = {"host"}
"""Facts that may differ between processes."""
TRAINABLE = {"processor", "instructions", "caches", "XLA_FLAGS"}
"""Facts that may differ in a training: the self-test shows whether the bits differ too. A strategy refuses differences of the other
facts."""
TIMEOUT = 60
"""Seconds in which all processes must connect. Each has little to do before."""


def is_one_of_several() -> bool:
    """Whether the environment describes several processes."""
    found = describe_by_first(os.environ)
    return found is not None and found[1].processes > 1


def meet_processes() -> Agreement:
    """Connect to the other processes, before JAX starts. The result is the agreement with them."""
    cluster = connect_processes(timeout=TIMEOUT)
    if cluster.processes == 1:
        return Agreement()
    begin_watch()
    return begin_agreement(cluster.process, cluster.processes)


def gather_findings(agreement: Agreement, findings: Sequence[Finding]) -> list[Finding]:
    """Gather all findings of process 0, and the others' bad ones.

    Findings of other processes with the verdict "ok" are left out.
    """
    records = agreement.gather_values("its findings", [finding.to_json() for finding in findings])
    others = [
        dataclasses.replace(finding, subject=f"{finding.subject}, process {number}")
        for number, theirs in enumerate(records)
        for finding in map(read_finding, theirs)
        if number and finding.verdict != PromiseVerdict.OK
    ]
    return [*map(read_finding, records[0]), *others]


def describe_process() -> dict[str, str]:
    """Collect the facts that this process' bits depend on, by name. JAX need not have started."""
    return list_versions() | {
        "host": socket.gethostname(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "kernels": describe_kernels(),
        "one CPU thread": str(runtime.count_threads() < runtime.FEWEST_THREADS),
        **device_kind.describe_processor(),
    }


def compare_processes(facts: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each fact that differs between processes. If none differs, it yields one finding that says so."""
    hosts = len({fact.get("host") for fact in facts})
    where = f"{len(facts)} processes on {hosts} machine{'s' * (hosts != 1)}"
    names = sorted({name for fact in facts for name in fact} - PLACES)
    differing = [name for name in names if len({fact.get(name) for fact in facts}) > 1]
    if not differing:
        yield Finding(SECTION, "all", f"{where}: versions, flags, kernels and processors are the same")
    for name in differing:
        odd = next(number for number, fact in enumerate(facts) if fact.get(name) != facts[0].get(name))
        texts = device_kind.list_kind_differences(
            {name: facts[odd].get(name) or "none"}, {name: facts[0].get(name) or "none"}, f"in process {odd}", "in process 0"
        )
        yield Finding(SECTION, name, texts[0].removeprefix(f"{name}: "), PromiseVerdict.BREAKS, "the same in all processes")


def examine_processes(agreement: Agreement, with_self_test: bool) -> tuple[list[Finding], list[dict[str, Json]]]:
    """Find differences between the processes, and train on them. The result has the findings, and the bits of each training."""
    facts = agreement.gather_values("what its bits depend on", describe_process())
    findings = list(compare_processes(facts))
    if not with_self_test:
        return findings, []
    if any(finding.verdict == PromiseVerdict.BREAKS and finding.subject not in TRAINABLE for finding in findings):
        return [*findings, Finding("placements", "self-test", "not run: the processes differ", PromiseVerdict.NOTE)], []
    more, trained = train_together(agreement, len(facts))
    return [*findings, *more], trained


def train_together(agreement: Agreement, processes: int) -> tuple[list[Finding], list[dict[str, Json]]]:
    """Train on each process alone and on all together. The result has the findings, and the bits of each training."""
    import jax  # with Keras, for which the examination of a single process does not wait

    from unisono._src.keras.strategy.builtin import OneDeviceStrategy
    from unisono._src.keras.strategy.multi_worker import MultiWorkerMirroredStrategy
    from unisono._src.tools.doctor import trainer
    from unisono._src.tools.doctor.installation import examine_devices

    replicas = max(trainer.REPLICAS, processes)
    together = MultiWorkerMirroredStrategy(devices=1, replicas=replicas)
    alone = OneDeviceStrategy(devices=jax.local_devices()[:1], replicas=replicas)
    bits = [
        trainer.train_on(alone, f"process {agreement.number} alone", replicas * 2),
        trainer.train_on(together, f"all processes, as process {agreement.number} has it", replicas * 2),
    ]
    gathered = agreement.gather_values("the bits of the self-test", list(map(dataclasses.asdict, bits)))
    trained = [record for placement in zip(*gathered, strict=True) for record in placement]
    devices = gather_findings(agreement, list(examine_devices()))
    return [*devices, *compare_placements(trained)], trained
