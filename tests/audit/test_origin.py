"""From the line in which two runs part, the audit goes back to the line that the difference comes from. The scripts here train nothing."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import pytest

from processes import environment
from unisono._src.audit.cause import Cause
from unisono._src.audit.origin import find_file_origin, find_in_callback, find_origin
from unisono._src.audit.script_run import TRACER
from unisono._src.audit.trace_comparison import Place, TraceComparison, read_trace

MARK, BEGIN = "# here", "# part"


def compare_runs(tmp_path: pathlib.Path, code: str) -> tuple[TraceComparison, pathlib.Path]:
    """Run a script twice, with other seeds of `hash` and as processes 0 and 1, and compare the lines."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    traces = []
    for number in ("0", "1"):
        variables = environment(PYTHONHASHSEED=number, UNISONO_PROCESS=number)
        subprocess.run([sys.executable, TRACER, str(tmp_path), str(script)], env=variables, check=True, timeout=60, cwd=tmp_path)
        traces.append(read_trace(tmp_path / f"trace-{number}.json"))
    return TraceComparison(*traces), script


def find_line(script: pathlib.Path, mark: str) -> int:
    (line,) = (number for number, text in enumerate(script.read_text().splitlines(), 1) if mark in text)
    return line


def find_place(comparison: TraceComparison, script: pathlib.Path, mark: str) -> Place:
    line = find_line(script, mark)
    return next(place for place in comparison.order if place.line == line)


CASES = {
    "a set in a function that is called": (
        """
        names = ["oak", "elm", "ash", "fir", "yew", "lime"]
        def number(names):
            return {name: place for place, name in enumerate(set(names))}  # here
        numbers = number(names)
        labels = [numbers[name] for name in names]
        print(labels)  # part
        """,
        Cause.HASH_ORDER,
    ),
    "a generator that an object keeps": (
        """
        import random
        class Shake:
            def __init__(self):
                self.size = 2
                self.source = random.SystemRandom().random()  # here
            def end(self):
                step = self.source * self.size
                print(step)  # part
        Shake().end()
        """,
        Cause.HOST_RANDOM,
    ),
    "a value from outside of the function": (
        """
        import time
        started = time.time_ns()
        def make(units):
            print(units, started % 1000)  # here, # part
        make(3)
        """,
        Cause.TIME,
    ),
    "a clock that is read again": (
        """
        import time
        class Slow:
            def begin(self):
                self.start = time.perf_counter()
            def step(self):
                passed = time.perf_counter() - self.start  # here
                print(passed)  # part
        slow = Slow()
        slow.begin()
        slow.step()
        """,
        Cause.TIME,
    ),
    "a line that one process alone runs": (
        """
        import os
        class Strategy:
            writes = os.environ["UNISONO_PROCESS"] == "0"
        strategy = Strategy()
        def lower(rate):
            if rate > 0 and strategy.writes:  # here
                print(rate / 2)  # part
        lower(0.1)
        """,
        Cause.PROCESS,
    ),
    "a line of a loop whose values differ later": (
        """
        import random
        source = random.SystemRandom()
        kernel = 1.0
        for _ in range(3):
            before = kernel * 1
            step = source.random()  # here
            kernel = before + step
        print(kernel)  # part
        """,
        Cause.HOST_RANDOM,
    ),
    "a function that is called again with what it returned": (
        """
        import random
        def shake(row):
            return random.SystemRandom().random()  # here
        def take(row):
            total = sum(map(shake, row))
            return total
        first = take([1, 2])
        second = take([first, 2])
        print(first, second)  # part
        """,
        Cause.HOST_RANDOM,
    ),
    "an object whose values are not known": (
        """
        class Part:
            __slots__ = ("start",)
            def __init__(self, start):
                self.start = start
        class Tower:
            def __init__(self, name):
                start = hash(name) % 1000  # here
                self.part = Part(start)
            def build(self):
                print(self.part.start)  # part
        Tower("users").build()
        """,
        Cause.HASH_ORDER,
    ),
    "a generator that is seeded by the number of the process": (
        """
        import os
        import random
        number = int(os.environ["UNISONO_PROCESS"])
        def call(inputs):
            factor = random.Random(number).uniform(0, 1)  # here
            return inputs * factor  # part
        call(2)
        """,
        Cause.PROCESS,
    ),
    "a loop whose objects are made of what they gave before": (
        """
        import random
        class Part:
            __slots__ = ("size",)
            def __init__(self, size):
                self.size = size
        n = random.SystemRandom().randrange(10**6)  # here
        for _ in range(3):
            part = Part(n)
            n = part.size + 1  # part
        """,
        Cause.HOST_RANDOM,
    ),
    "a state in call": (
        """
        class Layer:
            calls = 0
            def call(self, inputs):
                self.calls += 1  # here
                return inputs * self.calls  # part
        Layer().call(2)
        """,
        Cause.LAYER_STATE,
    ),
}


@pytest.mark.parametrize(("code", "cause"), CASES.values(), ids=CASES)
def test_the_origin_is_the_line_that_the_difference_comes_from(tmp_path, code, cause):
    comparison, script = compare_runs(tmp_path, code)
    origin = find_origin(comparison, find_place(comparison, script, BEGIN))
    assert (origin.place.line, origin.cause) == (find_line(script, MARK), cause)


def test_lines_whose_values_are_the_same_are_no_differences(tmp_path):
    comparison, _ = compare_runs(
        tmp_path,
        """
        import random
        source = random.Random(3)
        names = {"a": 1, "b": 2}
        total = sum(names.values()) + source.random()
        items = sorted({"x", "y", "z"})
        """,
    )
    assert comparison.list_differing_places() == []


def test_a_callback_that_changes_what_its_object_keeps_has_state(tmp_path):
    script = tmp_path / "callback.py"
    script.write_text("class Warm:\n    def count(self, rows):\n        self.seen += rows\n        return self.seen\n")
    origin = find_in_callback(str(script), 2, set())
    assert origin is not None
    assert (origin.place.line, origin.cause) == (3, Cause.LAYER_STATE)


def test_a_file_that_was_read_is_found_by_the_line_that_got_its_content(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("3.5")
    code = f"""
        import pathlib
        kept = pathlib.Path({str(kept)!r})
        def describe():
            if kept.exists():
                return float(kept.read_text())  # here
        print(describe())
        """
    comparison, script = compare_runs(tmp_path, code)
    origin = find_file_origin(comparison.one)
    assert origin is not None
    assert (origin.place.line, origin.cause) == (find_line(script, MARK), Cause.FILES)
