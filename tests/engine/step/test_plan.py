"""Who runs what."""

from __future__ import annotations

import jax
from hypothesis import given
from hypothesis import strategies as st

from unisono._src.engine.step.plan import ReplicaRun, plan_batch
from unisono._src.placement import Placement, ProcessPlacement, split_evenly


def placement(replicas: int, devices: int) -> Placement:
    return Placement(replicas, tuple(jax.devices()[:devices]))


def test_one_device_and_equal_replicas_are_one_run():
    assert plan_batch(32, None, placement(8, 1)).whole.runs == (ReplicaRun(4, 0, 0, 8, range(32)),)
    assert plan_batch(3, None, placement(8, 1)).whole.runs == (ReplicaRun(1, 0, 0, 3, range(3)),)


def test_larger_replicas_come_first_in_a_program_of_their_own():
    now = plan_batch(11, None, placement(8, 1))
    assert now.whole is None
    assert now.parts[0].runs == (ReplicaRun(2, 0, 0, 3, range(6)), ReplicaRun(1, 3, 3, 5, range(6, 11)))
    assert now.size_at_end == 1


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_every_row_and_every_replica_is_run_once_whatever_the_devices(rows, replicas, data):
    now = plan_batch(rows, None, placement(replicas, data.draw(st.integers(1, min(replicas, 8)))))
    runs = [run for part in now.parts for run in part.runs]
    assert [row for run in runs for row in run.rows] == list(range(rows))
    assert [r for run in runs for r in range(run.first, run.first + run.count)] == list(range(min(rows, replicas)))
    assert all(len(run.rows) == run.size * run.count for run in runs)
    assert [run.size for run in runs for _ in range(run.count)] == [len(p) for p in split_evenly(rows, replicas) if p]
    assert all(run.before == sum(r.count for r in part.runs[:i]) for part in now.parts for i, run in enumerate(part.runs))
    assert (now.size_at_end, now.present) == (runs[-1].size, min(rows, replicas))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.data())
def test_rows_that_were_dealt_out_stay_where_they_are(sizes, data):
    """Also with replicas in the middle that have none: the others are neighbours in the tree."""
    replicas = len(sizes)
    now = plan_batch(sum(sizes), tuple(sizes), placement(replicas, data.draw(st.integers(1, min(replicas, 8)))))
    runs = [run for part in now.parts for run in part.runs]
    assert [row for run in runs for row in run.rows] == list(range(sum(sizes)))
    present = [replica for replica, size in enumerate(sizes) if size]
    assert [r for run in runs for r in range(run.first, run.first + run.count)] == present
    assert [run.size for run in runs for _ in range(run.count)] == [size for size in sizes if size]
    spans = sorted((part.span.start, part.span.stop) for part in now.parts)
    assert [leaf for start, stop in spans for leaf in range(start, stop)] == list(range(now.leaves))
    assert now.leaves in (replicas, len(present))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.data())
def test_calls_run_every_replica_once(sizes, data):
    """Each call is of one size, and runs the next replicas of a device; one replica may have a call of its own."""
    replicas = len(sizes)
    now = plan_batch(sum(sizes), tuple(sizes), placement(replicas, data.draw(st.integers(1, min(replicas, 8)))))
    alone = data.draw(st.sampled_from([None, *now.replicas]))
    ran = []
    for layer in now.list_layers(alone):
        for device, part in enumerate(layer.parts):
            there = [(round_, round_.runs[device]) for round_ in layer.rounds if round_.runs[device] is not None]
            ran += [(r, run.size) for _, run in there for r in range(run.first, run.first + run.count)]
            assert [run.before for _, run in there] == [sum(run.count for _, run in there[:i]) for i in range(len(there))]
            assert all(run.size == round_.size and len(run.rows) == run.size * run.count for round_, run in there)
            assert [round_.is_last[device] for round_, _ in there] == [False] * (len(there) - 1) + [True] * bool(there)
            assert [round_.places[device] for round_, _ in there] == [part.span.start + run.before for _, run in there]
        lone = [round_ for round_ in layer.rounds if any(run and run.first == alone for run in round_.runs)]
        assert all([run.count for run in round_.runs if run] == [1] for round_ in lone)
    assert sorted(ran) == [(replica, sizes[replica]) for replica in now.replicas]


def test_a_process_without_rows_takes_part():
    """Its replicas have no place in the tree, where others in the middle have rows."""
    processes = ProcessPlacement(0, (None, None), (2, 2))  # pyright: ignore[reportArgumentType]  # no device is asked
    now = plan_batch(5, (0, 0, 3, 2), Placement(4, (None, None), processes))  # pyright: ignore[reportArgumentType]
    (layer,) = now.layers
    assert (layer.nodes, layer.rounds, now.first_round) == ((None, None), (), None)


def test_sizes_that_are_even_are_the_plan_of_even_sizes():
    for rows in range(1, 30):
        for devices in (1, 3, 8):
            even = tuple(len(part) for part in split_evenly(rows, 8))
            assert plan_batch(rows, even, placement(8, devices)) == plan_batch(rows, None, placement(8, devices))
