"""Sums and bytes of processes in memory that they share; threads stand for the processes."""

from __future__ import annotations

import concurrent.futures
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizes import cases
from unisono._src.engine import reduction_tree
from unisono._src.engine.exchange import shared_memory
from unisono._src.engine.exchange.gather_bytes import SharedBytes
from unisono._src.engine.exchange.protocol import SumDescription
from unisono._src.engine.exchange.shared_memory import LINE, SharedMemory, open_memory, round_up
from unisono._src.engine.exchange.shared_sum import SharedSum

DTYPES = "float32", "bfloat16", "int32", "float64", "uint8"


class Agreement:
    """An agreement of threads."""

    def __init__(self, number, values, barrier):
        self.number, self._values, self._barrier = number, values, barrier

    def gather_values(self, about, value):
        self._values[self.number] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def on_threads(count, run):
    """What each of the processes returns."""
    values, barrier = [None] * count, threading.Barrier(count, timeout=60)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: run(Agreement(number, values, barrier)), range(count)))


def open_memories(agreement, processes):
    shared = SharedMemory(agreement, processes)
    assert shared.open_room(LINE)
    return shared


def draw_sum(seed, processes, sizes):
    """(the sum as it is described, the nodes of each process, the total by NumPy)."""
    rng = np.random.default_rng(seed)
    leaves = [int(rng.integers(1, 4)) for _ in range(processes)]
    starts = np.cumsum([0, *leaves])
    like = {name: jax.ShapeDtypeStruct((16 * size,), jnp.dtype(name)) for name, size in zip(DTYPES, sizes, strict=False)}
    has_rows = [bool(rng.integers(0, 4)) for _ in range(starts[-1])]
    has_rows[rng.integers(0, len(has_rows))] = True
    spans = [
        [range(leaf, leaf + 1) for leaf in range(start, start + count)] for start, count in zip(starts, leaves, strict=False)
    ]
    values = [{name: (rng.standard_normal(leaf.shape) * 100).astype(leaf.dtype) for name, leaf in like.items()} for _ in has_rows]
    nodes = [[values[span.start] if has_rows[span.start] else None for span in own] for own in spans]
    described = tuple(tuple((span, has_rows[span.start]) for span in own) for own in spans)
    sums = {span: values[span.start] if has_rows[span.start] else None for own in spans for span in own}
    return SumDescription(int(starts[-1]), described, like, None), nodes, add(range(starts[-1]), sums)


def add(span, sums):
    """The sum in the order of the tree."""
    return reduction_tree.sum_tree(span, sums.__contains__, sums.__getitem__, lambda a, b: jax.tree.map(jnp.add, a, b))


@settings(max_examples=cases(5, 25))
@given(
    processes=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=len(DTYPES)),
    seed=st.integers(0, 99),
)
def test_the_total_has_the_bits_of_the_tree(processes, sizes, seed):
    """Of two sums in turn, the second of which needs more room; in each process, with the words of all."""
    with jax.enable_x64(True):
        drawn = [draw_sum(seed, processes, sizes), draw_sum(seed + 1, processes, [3 * size for size in sizes])]
        drawn.append(drawn[0])

    def run(agreement):
        with jax.enable_x64(True):
            shared = SharedSum(open_memories(agreement, processes), add)
            return [
                shared.total(nodes[agreement.number], description, (agreement.number, number))
                for number, (description, nodes, _) in enumerate(drawn)
            ]

    for found in on_threads(processes, run):
        for number, ((total, words), (_, _, expected)) in enumerate(zip(found, drawn, strict=True)):
            assert words.tolist() == [[process, number] for process in range(processes)]
            assert {name: (each.dtype.name, each.tobytes()) for name, each in total.items()} == {
                name: (each.dtype.name, np.asarray(each).tobytes()) for name, each in expected.items()
            }


@settings(max_examples=cases(5, 25))
@given(
    sizes=st.lists(st.lists(st.lists(st.integers(0, 200), max_size=3), min_size=3, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_bytes_of_all_come_to_each(sizes, seed):
    """Several times in turn, of any sizes: none, and more than there is room for. Our own do not come back."""
    rng = np.random.default_rng(seed)
    drawn = [[[rng.integers(0, 256, size).astype("uint16") for size in of_process] for of_process in turn] for turn in sizes]

    def run(agreement):
        gather = SharedBytes(open_memories(agreement, 3))
        return [gather(turn[agreement.number]) for turn in drawn]

    for number, found in enumerate(on_threads(3, run)):
        for gathered, turn in zip(found, drawn, strict=True):
            for other, (message, parts) in enumerate(zip(gathered, turn, strict=True)):
                start = 0
                for part in parts if other != number else ():
                    assert message[start : start + part.nbytes].tobytes() == part.tobytes()
                    start += round_up(part.nbytes)
                assert len(message) == start


def test_memory_of_others_is_not_opened(tmp_path):
    """As where process numbers are those of another container: there is no such file, or it is another one."""
    other = os.open(tmp_path, os.O_RDONLY)
    wrong = os.memfd_create("wrong")
    os.ftruncate(wrong, 4096)
    handles = (os.getpid(), 10**6, 1), (os.getpid(), other, 1), (os.getpid(), wrong, 1), (2**22 + 1, wrong, 1)
    assert [open_memory(*handle) for handle in handles] == [None] * 4
    for descriptor in (other, wrong):
        os.close(descriptor)


def test_memory_that_cannot_grow_is_an_error_in_all_processes(monkeypatch):
    """As where a process may open no more files."""
    description, nodes, _ = draw_sum(0, 2, [40])

    def run(agreement):
        shared = SharedSum(open_memories(agreement, 2), add)
        if agreement.gather_values("both have begun", True) and not agreement.number:
            monkeypatch.setattr(shared_memory, "open_memory", lambda *handle: None)
        agreement.gather_values("nothing is opened any more", True)
        with pytest.raises(OSError, match=r"A sum needs \d+ bytes of shared .*Set UNISONO_SHARED_MEMORY=0 in all of them"):
            shared.total(nodes[agreement.number], description, ())

    on_threads(2, run)
