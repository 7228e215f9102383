"""The verdict on a lost process, by what is known of all processes. Pure functions, so that every case can be tested."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from unisono._src.cluster.watch import local_processes
from unisono._src.processes import names
from unisono._src.processes.heartbeat import DONE, ENDED, RAISED, RUNNING, WAITING, WORKING, Heartbeat

PATIENCE = 0.7
"""The part of the bound after which a silent process is given up. The rest of the bound is for saying so and leaving."""

BEFORE_THE_FIRST_STEP = 10
"""The number of bounds that a process has for its first step: it reads data, builds and compiles."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """The knowledge that one process has of another.

    Args:
        record: The last heartbeat of the other process.
        silence: Seconds since that heartbeat.
        seen: The state that the kernel reports; None where the process runs on another machine.
    """

    record: Heartbeat
    silence: float
    seen: str | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The lost process, and in words how it was lost."""

    process: int
    words: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def parse_verdict(text: str) -> Verdict:
    return Verdict(**json.loads(text))


def describe_latest_step(heartbeat: Heartbeat, own: Heartbeat) -> str:
    """Return the last step of another process in words. Its heartbeat may be old; but all processes took part in the steps that this
    process has finished."""
    steps = [step for step in (heartbeat.step, own.step) if step is not None]
    return f"after step {max(steps)}" if steps else "before its first step"


def judge_processes(
    own: Heartbeat, heard: Mapping[int, Observation], bound: float, interval: float, stopped: float
) -> Verdict | None:
    """Return the verdict on a lost process, the surest one first; None where no process is lost.

    Args:
        own: The heartbeat of this process now.
        heard: What this process knows of each process.
        bound: Seconds within which a lost process is named and the others have ended.
        interval: Seconds between heartbeats.
        stopped: Seconds for which this process itself was stopped, just now.
    """
    others = [heard[process] for process in sorted(heard) if process != own.process]
    return (
        find_own_stop(own, others, bound, interval, stopped)
        or find_error(others)
        or find_silent(own, others, bound)
        or find_ended(own, others, interval)
        or find_stuck(own, others, bound)
        or find_different_waits(own, others, bound)
    )


def find_own_stop(own: Heartbeat, others: list[Observation], bound: float, interval: float, stopped: float) -> Verdict | None:
    """Return a verdict on this process where it was stopped for too long: a process that is gone has left because of it, and its message of
    that may not have reached the store."""
    if stopped < bound * PATIENCE - 2 * interval:
        return None
    for other in others:
        if other.seen == local_processes.GONE and other.record.state not in DONE:
            words = f"was stopped for {stopped:.1f} seconds, and {other.record} is gone: nobody waits so long."
            return Verdict(own.process, f"{own} {words}")
    return None


def find_error(others: list[Observation]) -> Verdict | None:
    """Return a verdict on a process that has raised an error of its own."""
    for other in others:
        if other.record.state == RAISED:
            return make_error_verdict(other.record)
    return None


def make_error_verdict(heartbeat: Heartbeat) -> Verdict:
    return Verdict(heartbeat.process, f"{heartbeat} raised {heartbeat.words}, {heartbeat.where}.")


def find_silent(own: Heartbeat, others: list[Observation], bound: float) -> Verdict | None:
    """Return a verdict on a process that is gone, or that has sent no heartbeat for too long."""
    for other in others:
        heartbeat = other.record
        if heartbeat.state in DONE:
            continue
        step = describe_latest_step(heartbeat, own)
        silence = f"nothing was heard of it for {other.silence:.1f} seconds"
        if other.seen == local_processes.GONE:
            return Verdict(
                heartbeat.process, f"{heartbeat} was killed {step}: it is gone without a word, as by a signal or os._exit."
            )
        if other.silence < bound * PATIENCE:
            continue
        if other.seen == local_processes.STOPPED:
            return Verdict(heartbeat.process, f"{heartbeat} is stopped (SIGSTOP) {step}: {silence}.")
        if other.seen == local_processes.THERE:
            return Verdict(heartbeat.process, f"{heartbeat} is stuck in compiled code {step}: {silence}.")
        return Verdict(heartbeat.process, f"{heartbeat} is killed, stopped or cut off {step}: {silence}.")
    return None


def find_ended(own: Heartbeat, others: list[Observation], interval: float) -> Verdict | None:
    """Return a verdict on a process that has come to the end of its program while this process waits for it."""
    if own.phase != WAITING or own.state != RUNNING or own.seconds < max(1.0, 2 * interval):
        return None
    for other in others:
        if other.record.state == ENDED:
            return Verdict(
                other.record.process,
                f"{other.record} left its program {other.record.where}, and process {own.process} waits for it.",
            )
    return None


def find_stuck(own: Heartbeat, others: list[Observation], bound: float) -> Verdict | None:
    """Return a verdict on a process that has not moved while another waits. The process that has not moved for longest holds up the others."""
    everybody = [own, *(other.record for other in others)]
    if not any(heartbeat.phase == WAITING and heartbeat.seconds >= bound * PATIENCE for heartbeat in everybody):
        return None
    still = [heartbeat for heartbeat in everybody if is_still(heartbeat, bound)]
    if not still:
        return None
    longest = max(still, key=lambda heartbeat: heartbeat.seconds)
    return Verdict(
        longest.process,
        f"{longest} is stuck {longest.where}: it has not moved for {longest.seconds:.1f} seconds while others wait for it. If it is meant to "
        f"take so long, set {names.BOUND} (unisono launch --bound) to more seconds. It stands here:\n{longest.stack.rstrip()}",
    )


def find_different_waits(own: Heartbeat, others: list[Observation], bound: float) -> Verdict | None:
    """Return a verdict on a process that waits for something else than the first: all processes wait, and none will come."""
    everybody = sorted([own, *(other.record for other in others)], key=lambda heartbeat: heartbeat.process)
    first = everybody[0]
    if any(
        heartbeat.state != RUNNING or heartbeat.phase != WAITING or heartbeat.seconds < bound * PATIENCE
        for heartbeat in everybody
    ):
        return None
    other = next((heartbeat for heartbeat in everybody if heartbeat.words != first.words), None)
    if other is None:
        return None
    return Verdict(
        other.process,
        f"{other} waits {other.words} {other.where}, and {first} waits {first.words} {first.where}: nobody will come. Their data have other "
        f"lengths, or one of them calls what the other does not.",
    )


def is_still(heartbeat: Heartbeat, bound: float) -> bool:
    """Return whether the main thread of a process has worked for too long without finishing a step."""
    allowed = bound * PATIENCE * (BEFORE_THE_FIRST_STEP if heartbeat.step is None else 1)
    return heartbeat.state == RUNNING and heartbeat.phase == WORKING and heartbeat.seconds >= allowed
