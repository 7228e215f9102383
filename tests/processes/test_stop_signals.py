"""Signals that ask a training to stop: heard once, in the process and the thread that trains, and lost nowhere."""

from __future__ import annotations

import signal

import pytest

from processes import python
from threads import in_thread
from unisono._src.processes.stop_signals import SIGNALS, listen_for_signals


def test_a_signal_that_nobody_answers_is_raised_again():
    with pytest.raises(KeyboardInterrupt), listen_for_signals(["SIGINT"]):
        signal.raise_signal(signal.SIGINT)


def test_an_error_is_not_lost_over_a_signal():
    def broken_off():
        with listen_for_signals(["SIGINT"]):
            signal.raise_signal(signal.SIGINT)
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        broken_off()


def test_signals_have_names():
    with pytest.raises(ValueError, match="received 'SIGNOPE', which this system does not know"):
        listen_for_signals(["SIGNOPE"]).__enter__()


def test_signals_in_another_thread_are_warned_about():
    """Python takes them in its main thread."""

    def training():
        with pytest.warns(UserWarning, match=r"SIGTERM, SIGINT will not be heard: .*in the thread 'worker'.*write signals=\(\)"):
            listen_for_signals(SIGNALS).__enter__()
        with listen_for_signals(()):
            return True

    assert in_thread("worker", training)


FORKING = """
import os, signal, time
from unisono._src.processes.stop_signals import listen_for_signals

with listen_for_signals(["SIGTERM"]) as stop:
    begun, begins = os.pipe()
    child = os.fork()  # as a dataset does for its workers
    if child == 0:
        os.write(begins, b"-")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)  # Python forgets signals that come before
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print("ended by", os.WTERMSIG(status), "and asked", stop.asked_by)
"""


def test_a_forked_process_does_not_hear_the_signal():
    """Nobody has asked the training to stop: the process ends as if there were no backup."""
    done = python("-c", FORKING, timeout=60)
    assert done.stdout.split("\n")[-2] == f"ended by {int(signal.SIGTERM)} and asked None", done.stderr
    assert "saving after this step" not in done.stderr
