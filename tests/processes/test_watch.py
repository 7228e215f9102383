"""The judgement of the watch. Real processes that are lost are in `test_watch_integration`."""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from unisono._src.processes import names
from unisono._src.processes.activity import Activity
from unisono._src.processes.watch import ends, local_processes
from unisono._src.processes.watch.begin import is_fault_of_others
from unisono._src.processes.watch.board import Board, Heartbeat, Verdict
from unisono._src.processes.watch.verdict import PATIENCE, Observation, judge_processes
from unisono._src.processes.watch.watch import SOON, ProcessWatch, format_stack

BOUND, INTERVAL = 10.0, 1.0
NAME = "process 1 (pid 11 on b)"


def record(process=1, **changes):
    return dataclasses.replace(Heartbeat(process, 10 + process, 1, "m", "abc"[process], step=4), **changes)


def verdict(own=None, seen=None, silence=0.0, third=None, stopped=0.0, **changes):
    """Of process 0, on process 1."""
    own = record(0, step=5) if own is None else own
    others = [Observation(record(1, **changes), silence, seen), *([] if third is None else [third])]
    return judge_processes(own, others, BOUND, INTERVAL, stopped)


WAITING = record(0, step=4, phase="waiting", seconds=8.0)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, None),
        ({"silence": 6.9}, None),
        ({"seen": "gone"}, f"{NAME} was killed after step 5: it is gone without a word, as by a signal or os._exit."),
        (
            {"seen": "gone", "step": None, "own": record(0, step=None)},
            f"{NAME} was killed before its first step: it is gone without a word, as by a signal or os._exit.",
        ),
        ({"seen": "gone", "state": "ended"}, None),
        ({"seen": "gone", "state": "left"}, None),
        (
            {"silence": 7.0},
            f"{NAME} is killed, stopped or cut off after step 5: nothing was heard of it for 7.0 seconds.",
        ),
        ({"silence": 7.0, "seen": "stopped"}, f"{NAME} is stopped (SIGSTOP) after step 5: nothing was heard of it for 7.0 seconds."),
        ({"silence": 1.0, "seen": "stopped"}, None),
        (
            {"silence": 7.0, "seen": "there"},
            f"{NAME} is stuck in compiled code after step 5: nothing was heard of it for 7.0 seconds.",
        ),
        ({"state": "raised", "words": "KeyError: 1"}, f"{NAME} raised KeyError: 1, after step 4."),
        ({"state": "ended"}, None),
        ({"state": "ended", "own": WAITING}, f"{NAME} left its program after step 4, and process 0 waits for it."),
        ({"state": "ended", "own": dataclasses.replace(WAITING, seconds=1.9)}, None),
        ({"seconds": 6.9, "own": WAITING}, None),
        ({"seconds": 60.0}, None),
        ({"seconds": 60.0, "phase": "busy", "own": WAITING}, None),
        ({"seconds": 60.0, "phase": "waiting", "own": WAITING}, None),
        ({"seconds": 69.0, "step": None, "own": WAITING}, None),
        (
            {"seconds": 7.0, "own": WAITING, "stack": "  File x\n"},
            f"{NAME} is stuck after step 4: it has not moved for 7.0 seconds while others wait for it. If it is meant to take so long, set "
            f"UNISONO_BOUND (unisono launch --bound) to more seconds. It stands here:\n  File x",
        ),
        (
            {"seconds": 70.0, "step": None, "own": WAITING},
            f"{NAME} is stuck before its first step: it has not moved for 70.0 seconds while others wait for it. If it is meant to take so "
            f"long, set UNISONO_BOUND (unisono launch --bound) to more seconds. It stands here:\n",
        ),
    ],
)  # fmt: skip
def test_who_is_lost_and_how(known, words):
    found = verdict(**known)
    assert (None if found is None else found.words) == words
    assert found is None or found.process == 1


FOR_WORDS = record(0, step=5, phase="waiting", seconds=8.0, words="to hear of R")
FOR_A_SUM = {"phase": "waiting", "seconds": 7.5, "words": "for a sum"}


def test_who_waits_for_different_things_waits_in_vain():
    found = verdict(FOR_WORDS, **FOR_A_SUM)
    assert (found.process, found.words) == (
        1,
        f"{NAME} waits for a sum after step 4, and process 0 (pid 10 on a) waits to hear of R after step 5: nobody will come. Their data have "
        f"other lengths, or one of them calls what the other does not.",
    )
    assert verdict(FOR_WORDS, **FOR_A_SUM | {"words": "to hear of R"}) is None, "a slow one"
    assert verdict(FOR_WORDS, **FOR_A_SUM | {"seconds": 3.0}) is None, "it has just come"
    busy = Observation(record(2, phase="busy", seconds=20.0, words="compiling"), 0, "there")
    assert verdict(FOR_WORDS, third=busy, **FOR_A_SUM) is None, "somebody is still on the way"


def test_what_is_surest_comes_first():
    silent = Observation(record(2), 8.0, None)
    assert verdict(third=silent).process == 2
    assert verdict(third=silent, state="raised", words="KeyError").process == 1
    assert verdict(third=silent, own=WAITING, seconds=9.0).process == 2


def test_who_was_stopped_for_long_takes_nobodys_death_for_the_reason():
    """The others have left because of it, and their word of it did not reach the store."""
    found = verdict(seen="gone", stopped=5.0)
    assert (found.process, found.words) == (
        0,
        f"process 0 (pid 10 on a) was stopped for 5.0 seconds, and {NAME} is gone: nobody waits so long.",
    )
    assert verdict(seen="gone", stopped=4.9).process == 1, "others would have waited"
    assert verdict(seen="gone", state="ended", stopped=5.0) is None
    assert verdict(seen="there", stopped=5.0) is None
    assert verdict(stopped=5.0) is None, "on another machine"


def test_a_process_judges_itself_too():
    """Its main thread stands still while another process waits; the stack is its own."""
    found = verdict(own=record(0, seconds=8.0, stack="here"), phase="waiting", seconds=8.0)
    assert found.process == 0
    assert found.words.endswith("here")


def test_the_one_that_stands_for_longest_holds_up_the_others():
    assert verdict(own=WAITING, seconds=8.0, third=Observation(record(2, seconds=9.0), 0, None)).process == 2


@pytest.mark.parametrize(
    ("process", "words", "code"),
    [
        (0, "process 1 is stuck. It stands here:\n  File x", names.LOST),
        (1, "process 1 is stuck. It stands here:\n  File ", names.STUCK),
    ],
)
def test_whose_verdict_came_second_has_the_first_ones_stack_too(process, words, code, monkeypatch):
    """Two processes come to it in one moment, and differ in the tenths of a second."""
    first = Verdict(1, "process 1 is stuck. It stands here:\n  File x")
    board, thread = types.SimpleNamespace(settle=lambda _: first), threading.get_ident()
    watch = types.SimpleNamespace(process=process, state="running", board=board, thread=thread)
    ended = []
    monkeypatch.setattr(ends, "end_process", lambda *arguments: ended.append(arguments))
    ends.end_after_verdict(watch, Verdict(1, "process 1 is stuck, as seen a moment later. It stands here:\n  File x"))
    [(_, said, with_code)] = ended
    assert said.startswith(words)
    assert with_code == code


class Store(dict):
    """JAX' key-value store, in this process."""

    def key_value_set(self, key, value, allow_overwrite=False):
        self[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in sorted(self.items()) if key.startswith(folder)]


def test_everybody_is_met_soon_however_long_the_heartbeats_take():
    store = Store()
    one, other = (ProcessWatch(process, 2, store, 600.0) for process in range(2))
    try:
        one.start(lambda *_: None)
        assert not one.all_met.wait(3 * SOON)
        other.start(lambda *_: None)
        begun = time.monotonic()
        assert one.all_met.wait(60)
        assert other.all_met.wait(60)
        assert time.monotonic() - begun < one.interval, "not with the next heartbeat"
    finally:
        for watch in (one, other):
            watch.rest(60)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("unisono watch")] == []


class Stopping(threading.Event):
    """Stops the judging thread once, as SIGSTOP would, while something happens."""

    def __init__(self, meanwhile):
        super().__init__()
        self.meanwhile = [meanwhile]

    def wait(self, timeout=None):
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().wait(timeout)


def test_a_process_sees_that_it_was_stopped():
    found, store = queue.Queue(), Store()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        other = Heartbeat(
            1, child.pid, local_processes.read_start_time(child.pid), local_processes.read_machine_name(), "b", step=4
        )
        Board(store).publish_heartbeat(other)
        watch = ProcessWatch(0, 2, store, 2.0)

        def stopped():
            watch.all_met.wait()
            child.kill()
            child.wait()
            time.sleep(watch.bound * PATIENCE)

        watch._over = Stopping(stopped)
        watch.start(lambda _, verdict: found.put(verdict))
        verdict = found.get(timeout=60)
        watch.rest(60)
    assert verdict.process == 0
    assert re.search(rf" was stopped for [\d.]+ seconds, and process 1 \(pid {child.pid} on b\) is gone", verdict.words)


def test_a_record_survives_the_store():
    board = Board(Store())
    board.publish_heartbeat(record())
    assert board.read_heartbeats() == {1: record()}
    assert board.read_verdict() is None
    assert board.settle(Verdict(1, "is lost")) == board.read_verdict() == Verdict(1, "is lost")


def test_progress():
    progress = Activity()
    begun = progress.moved_at
    with progress.report_waiting("for a sum"):
        assert progress.phase == "waiting"
        with progress.report_busy("compiling"):
            assert (progress.phase, progress.doing) == ("busy", "compiling")
        assert progress.phase == "waiting"
    assert (progress.phase, progress.doing, progress.step) == ("working", "", None)
    progress.report_step(3)
    assert progress.step == 3
    assert progress.moved_at > begun


def test_what_the_kernel_says():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            born = local_processes.read_start_time(child.pid)
            assert local_processes.read_process_state(child.pid, born) == "there"
            assert local_processes.read_process_state(child.pid, born + 1) == "gone"
            os.kill(child.pid, signal.SIGSTOP)
            while local_processes.read_process_state(child.pid, born) == "there":
                time.sleep(0.01)
            assert local_processes.read_process_state(child.pid, born) == "stopped"
        finally:
            child.kill()
        while local_processes.read_process_state(child.pid, born) != "gone":  # before it is waited for
            time.sleep(0.01)
    assert local_processes.read_process_state(child.pid, born) == "gone"
    assert local_processes.read_machine_name() == local_processes.read_machine_name()


def test_the_stack_is_of_the_thread_that_trains():
    """Which need not be the main one: tools run the program in a thread of theirs."""
    done = threading.Event()
    trains = threading.Thread(target=done.wait)
    trains.start()
    ident = trains.ident or 0
    stack = format_stack(ident)
    done.set()
    trains.join()
    assert "in wait" in stack
    assert "test_the_stack" not in stack
    assert format_stack(ident) == ""
    assert "test_the_stack_is_of_the_thread_that_trains" in format_stack(threading.get_ident())


def raised_in(module: str, error: Exception) -> Exception:
    code = compile("raise error", "<test>", "exec")
    try:
        exec(code, {"__name__": module, "error": error})
    except Exception as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("module", "words", "others"),
    [
        ("jax._src.x", "UNKNOWN: Gloo AllGather failed: Connection reset by peer", True),
        ("jaxlib.x", "UNAVAILABLE: no", True),
        ("jax._src.x", "RESOURCE_EXHAUSTED: Out of memory", False),
        ("jax._src.x", "shapes do not fit", False),
        ("user", "UNKNOWN: mine", False),
    ],
)
def test_whose_fault_an_error_is(module, words, others):
    error = raised_in(module, ValueError(words))
    assert is_fault_of_others(error) is others
    wrapped = RuntimeError("a step could not run")
    wrapped.__cause__ = error
    assert is_fault_of_others(wrapped) is others
