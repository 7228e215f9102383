"""The verdict on a lost process, from what all have said. Pure functions, so that every case can be tested."""

from __future__ import annotations

import dataclasses

from unisono._src.processes import names
from unisono._src.processes.activity import WAITING, WORKING
from unisono._src.processes.watch.board import DONE, ENDED, RAISED, RUNNING, Heartbeat, Verdict, describe_step
from unisono._src.processes.watch.local_processes import GONE, STOPPED, THERE

PATIENCE = 0.7
"""A silent process is given up after this part of the bound. The rest is for saying so and leaving."""

BEFORE_THE_FIRST_STEP = 10
"""The number of bounds that a process has for its first step, in which it reads data, builds and compiles."""

SILENT = {STOPPED: "is stopped (SIGSTOP)", THERE: "is stuck in compiled code", None: "is killed, stopped or cut off"}
"""What happened to a silent process, by its state in the kernel."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """What one process knows of another."""

    heartbeat: Heartbeat
    silence: float
    """Seconds since that heartbeat."""
    seen: str | None
    """The state that the kernel reports. None if the process runs on another machine."""


def judge_processes(own: Heartbeat, others: list[Observation], bound: float, interval: float, stopped: float) -> Verdict | None:
    """Judge whether a process is lost, the surest verdict first.

    None if no process is lost.

    Args:
        own: The heartbeat of this process now.
        others: What this process knows of the others, in the order of their numbers.
        bound: Seconds within which a lost process is named and the others have ended.
        interval: Seconds between heartbeats.
        stopped: Seconds for which this process itself was stopped, just now.
    """
    patience = bound * PATIENCE
    everybody = sorted([own, *(other.heartbeat for other in others)], key=lambda heartbeat: heartbeat.process)
    own_stop = find_own_stop(own, others, stopped) if stopped >= patience - 2 * interval else None
    return (
        own_stop
        or find_error(others)
        or find_silent(own, others, patience)
        or find_ended(own, others, interval)
        or find_stuck(everybody, patience)
        or find_different_waits(everybody, patience)
    )


def make_verdict(heartbeat: Heartbeat, words: str) -> Verdict:
    """Write a verdict that begins with the process' name."""
    return Verdict(heartbeat.process, f"{heartbeat} {words}")


def make_error_verdict(heartbeat: Heartbeat) -> Verdict:
    return make_verdict(heartbeat, f"raised {heartbeat.words}, {heartbeat.where}.")


def find_own_stop(own: Heartbeat, others: list[Observation], stopped: float) -> Verdict | None:
    """Find whether this process was stopped for too long.

    A process that is gone has left because of it, and its message may not have reached the store.
    """
    for other in others:
        if other.seen == GONE and other.heartbeat.state not in DONE:
            return make_verdict(
                own, f"was stopped for {stopped:.1f} seconds, and {other.heartbeat} is gone: nobody waits so long."
            )
    return None


def find_error(others: list[Observation]) -> Verdict | None:
    """Find a process that has raised an error of its own."""
    return next((make_error_verdict(other.heartbeat) for other in others if other.heartbeat.state == RAISED), None)


def find_silent(own: Heartbeat, others: list[Observation], patience: float) -> Verdict | None:
    """Find a process that is gone, or silent for too long.

    Its last heartbeat may be old; but all processes took part in the steps that this process has finished.
    """
    for other in others:
        heartbeat = other.heartbeat
        if heartbeat.state in DONE:
            continue
        where = describe_step(max((step for step in (heartbeat.step, own.step) if step is not None), default=None))
        if other.seen == GONE:
            return make_verdict(heartbeat, f"was killed {where}: it is gone without a word, as by a signal or os._exit.")
        if other.silence >= patience:
            silence = f"nothing was heard of it for {other.silence:.1f} seconds"
            return make_verdict(heartbeat, f"{SILENT[other.seen]} {where}: {silence}.")
    return None


def find_ended(own: Heartbeat, others: list[Observation], interval: float) -> Verdict | None:
    """Find a process that ended its program while this one waits."""
    if own.phase != WAITING or own.state != RUNNING or own.seconds < max(1.0, 2 * interval):
        return None
    for other in others:
        heartbeat = other.heartbeat
        if heartbeat.state == ENDED:
            return make_verdict(heartbeat, f"left its program {heartbeat.where}, and process {own.process} waits for it.")
    return None


def find_stuck(everybody: list[Heartbeat], patience: float) -> Verdict | None:
    """Find a process that has not moved while another waits. The process that has not moved for longest holds up the others."""
    if not any(heartbeat.phase == WAITING and heartbeat.seconds >= patience for heartbeat in everybody):
        return None
    still = [heartbeat for heartbeat in everybody if is_still(heartbeat, patience)]
    if not still:
        return None
    longest = max(still, key=lambda heartbeat: heartbeat.seconds)
    return make_verdict(
        longest,
        f"is stuck {longest.where}: it has not moved for {longest.seconds:.1f} seconds while others wait for it. If it is meant to "
        f"take so long, set {names.BOUND} (unisono launch --bound) to more seconds. It stands here:\n{longest.stack.rstrip()}",
    )


def is_still(heartbeat: Heartbeat, patience: float) -> bool:
    """Whether a main thread has worked too long without a step."""
    allowed = patience * (BEFORE_THE_FIRST_STEP if heartbeat.step is None else 1)
    return heartbeat.state == RUNNING and heartbeat.phase == WORKING and heartbeat.seconds >= allowed


def find_different_waits(everybody: list[Heartbeat], patience: float) -> Verdict | None:
    """Find a process that waits for something else than the first. All processes wait, and none will come."""
    first = everybody[0]
    if not all(
        heartbeat.state == RUNNING and heartbeat.phase == WAITING and heartbeat.seconds >= patience for heartbeat in everybody
    ):
        return None
    for other in everybody:
        if other.words != first.words:
            return make_verdict(
                other,
                f"waits {other.words} {other.where}, and {first} waits {first.words} {first.where}: nobody will come. Their data have other "
                f"lengths, or one of them calls what the other does not.",
            )
    return None
