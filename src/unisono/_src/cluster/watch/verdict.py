"""Who is lost, and how: a judgement over what is known of all processes. Pure, so that every case can be tested."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from unisono._src.cluster.watch import local_processes
from unisono._src.processes import names
from unisono._src.processes.record import DONE, ENDED, RAISED, RUNNING, WAITING, WORKING, Record

PATIENCE = 0.7
"""The part of the bound after which a process that says nothing is given up; the rest is for saying so and leaving."""

BEFORE_THE_FIRST_STEP = 10
"""So many bounds are allowed to a process that has finished no step: it reads data, builds and compiles."""


@dataclasses.dataclass(frozen=True)
class Heard:
    """What one process knows of another one.

    Args:
        record: Its last heartbeat.
        silence: Seconds since.
        seen: What the kernel says of it, where it is on this machine.
    """

    record: Record
    silence: float
    seen: str | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The process that is lost, and in words how."""

    process: int
    words: str

    def encoded(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def decoded(text: str) -> Verdict:
    return Verdict(**json.loads(text))


def place(record: Record, own: Record) -> str:
    """After which step. A heartbeat is older than its process; who has finished a step knows that all took part in it."""
    steps = [step for step in (record.step, own.step) if step is not None]
    return f"after step {max(steps)}" if steps else "before its first step"


def judged(own: Record, heard: Mapping[int, Heard], bound: float, interval: float, stopped: float) -> Verdict | None:
    """None where nobody is lost. What is surest comes first.

    Args:
        own: What this process would tell of itself.
        heard: What it knows of each process.
        bound: Seconds within which a lost process is named and the others have ended.
        interval: Seconds between heartbeats.
        stopped: Seconds for which this process itself was stopped, just now.
    """
    others = [heard[process] for process in sorted(heard) if process != own.process]
    return (
        given_up(own, others, bound, interval, stopped)
        or raised(others)
        or silent(own, others, bound)
        or missing(own, others, interval)
        or stuck(own, others, bound)
        or apart(own, others, bound)
    )


def given_up(own: Record, others: list[Heard], bound: float, interval: float, stopped: float) -> Verdict | None:
    """After a stop that nobody puts up with: who is gone is so because of it, and its word of it may not have reached the store."""
    if stopped < bound * PATIENCE - 2 * interval:
        return None
    for other in others:
        if other.seen == local_processes.GONE and other.record.state not in DONE:
            words = f"was stopped for {stopped:.1f} seconds, and {other.record} is gone: nobody waits so long."
            return Verdict(own.process, f"{own} {words}")
    return None


def raised(others: list[Heard]) -> Verdict | None:
    for other in others:
        if other.record.state == RAISED:
            return of_error(other.record)
    return None


def of_error(record: Record) -> Verdict:
    return Verdict(record.process, f"{record} raised {record.words}, {record.where}.")


def silent(own: Record, others: list[Heard], bound: float) -> Verdict | None:
    for other in others:
        record = other.record
        if record.state in DONE:
            continue
        where, unheard = place(record, own), f"nothing was heard of it for {other.silence:.1f} seconds"
        if other.seen == local_processes.GONE:
            return Verdict(record.process, f"{record} was killed {where}: it is gone without a word, as by a signal or os._exit.")
        if other.silence < bound * PATIENCE:
            continue
        if other.seen == local_processes.STOPPED:
            return Verdict(record.process, f"{record} is stopped (SIGSTOP) {where}: {unheard}.")
        if other.seen == local_processes.THERE:
            return Verdict(record.process, f"{record} is stuck in compiled code {where}: {unheard}.")
        return Verdict(record.process, f"{record} is killed, stopped or cut off {where}: {unheard}.")
    return None


def missing(own: Record, others: list[Heard], interval: float) -> Verdict | None:
    """Who has come to the end of its program while this process waits for it."""
    if own.phase != WAITING or own.state != RUNNING or own.seconds < max(1.0, 2 * interval):
        return None
    for other in others:
        if other.record.state == ENDED:
            return Verdict(
                other.record.process,
                f"{other.record} left its program {other.record.where}, and process {own.process} waits for it.",
            )
    return None


def stuck(own: Record, others: list[Heard], bound: float) -> Verdict | None:
    """Who has not moved, while somebody waits. The one that stands still for longest is the one that holds up the others."""
    everybody = [own, *(other.record for other in others)]
    if not any(record.phase == WAITING and record.seconds >= bound * PATIENCE for record in everybody):
        return None
    still = [record for record in everybody if is_still(record, bound)]
    if not still:
        return None
    record = max(still, key=lambda record: record.seconds)
    return Verdict(
        record.process,
        f"{record} is stuck {record.where}: it has not moved for {record.seconds:.1f} seconds while others wait for it. If it is meant to "
        f"take so long, set {names.BOUND} (unisono launch --bound) to more seconds. It stands here:\n{record.stack.rstrip()}",
    )


def apart(own: Record, others: list[Heard], bound: float) -> Verdict | None:
    """All wait, but not for the same: nobody will come."""
    everybody = sorted([own, *(other.record for other in others)], key=lambda record: record.process)
    first = everybody[0]
    if any(record.state != RUNNING or record.phase != WAITING or record.seconds < bound * PATIENCE for record in everybody):
        return None
    other = next((record for record in everybody if record.words != first.words), None)
    if other is None:
        return None
    return Verdict(
        other.process,
        f"{other} waits {other.words} {other.where}, and {first} waits {first.words} {first.where}: nobody will come. Their data have other "
        f"lengths, or one of them calls what the other does not.",
    )


def is_still(record: Record, bound: float) -> bool:
    allowed = bound * PATIENCE * (BEFORE_THE_FIRST_STEP if record.step is None else 1)
    return record.state == RUNNING and record.phase == WORKING and record.seconds >= allowed
