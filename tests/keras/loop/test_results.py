"""What replicas return, and what becomes of it: run, local results, reduce, gather."""

import warnings

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import unisono as un
from loops import Loop, data
from sizes import cases, mostly_slow, slow
from trainings import on

X, _ = data("dense", 43)


@pytest.fixture(params=[(2, 4), *slow(((3, 4),), ((1, 1),), ((1, 4),))], ids=["R=4 on 2", "R=4 on 3", "R=1", "R=4 on 1"])
def loop(request):
    return Loop(on(*request.param))


def batches(loop, rows=X, size=10):
    return loop.strategy.distribute_dataset((rows, np.arange(len(rows))), batch_size=size)


def first(loop, rows=X, size=10):
    return next(iter(batches(loop, rows, size)))


def rows_and_total(batch):
    return batch[0], ops.sum(batch[0])


def test_one_result_for_each_replica_in_order(loop):
    def code(batch):
        context = un.get_replica_context()
        assert not un.in_cross_replica_context()
        assert context.num_replicas_in_sync == loop.strategy.num_replicas_in_sync
        return {"id": context.replica_id_in_sync_group, "rows": batch[1], "none": None, "text": "same"}

    replicas = loop.strategy.num_replicas_in_sync
    found = loop.strategy.local_results(loop.strategy.run(code, args=(first(loop),)))
    assert [int(result["id"]) for result in found] == list(range(replicas))
    assert [row for result in found for row in result["rows"].tolist()] == list(range(10))
    assert all(result["text"] == "same" and result["none"] is None for result in found)
    assert [result["rows"].devices() for result in found] == [{loop.strategy.devices[0]}] * replicas
    assert all(isinstance(part, np.ndarray) for part in loop.strategy.local_results(first(loop))[0])


def test_results_are_computed_with_together(loop):
    """Whatever the devices on which the replicas ran."""
    rows, sums = zip(*loop.strategy.local_results(loop.strategy.run(rows_and_total, args=(first(loop),))), strict=True)
    np.testing.assert_allclose(sum(sums), X[:10].sum(), rtol=1e-5)
    np.testing.assert_array_equal(ops.concatenate(rows, axis=0), X[:10])


def test_replicas_without_rows_are_not_run(loop):
    """Their results are zero, in the shape of the others'."""
    code = lambda batch: (batch[0], ops.sum(batch[0]), ops.ones((6, 5)))
    rows, totals, ones = loop.strategy.run(code, args=(first(loop, X[:1]),))
    none = loop.strategy.num_replicas_in_sync - 1
    assert [part.shape for part in rows.values] == [(1, 6)] + [(0, 6)] * none
    assert [float(v) for v in totals.values[1:]] == [0.0] * none
    assert [float(ops.sum(part)) for part in ones.values] == [30] + [0] * none
    np.testing.assert_allclose(loop.strategy.reduce("MEAN", totals), X[0].sum(), rtol=1e-6)
    np.testing.assert_array_equal(loop.strategy.gather(rows, axis=0), X[:1])


@pytest.mark.parametrize("op", [un.ReduceOp.SUM, "Sum", *slow("SUM", "sum")])
def test_sums(loop, op):
    rows, total = loop.strategy.run(rows_and_total, args=(first(loop),))
    np.testing.assert_allclose(loop.strategy.reduce(op, total, axis=None), X[:10].sum(), rtol=1e-5)
    np.testing.assert_allclose(loop.strategy.reduce(op, rows, axis=0), X[:10].sum(0), rtol=1e-5)
    with loop.strategy.scope():
        np.testing.assert_allclose(loop.strategy.reduce(op, {"a": [total]})["a"][0], X[:10].sum(), rtol=1e-5)


def test_means_weigh_real_rows(loop):
    """Of rows: all of them; without an axis: of the replicas that have some."""
    rows, total = loop.strategy.run(rows_and_total, args=(first(loop),))
    for op in ("mean", un.ReduceOp.MEAN):
        np.testing.assert_allclose(loop.strategy.reduce(op, rows, axis=0), X[:10].mean(0), rtol=1e-5)
    np.testing.assert_allclose(loop.strategy.reduce("MEAN", total), X[:10].sum() / loop.strategy.num_replicas_in_sync, rtol=1e-5)


SHARES = {
    "of the engine": lambda losses: losses,
    "of an average": un.compute_average_loss,
    "with a regularizer": lambda losses: un.compute_average_loss(losses) + un.scale_regularization_loss(1.0),
}


@pytest.mark.parametrize("how", mostly_slow(SHARES, "of the engine", "with a regularizer"))
def test_a_mean_of_shares_of_a_loss_is_warned_about(loop, how):
    share = loop.strategy.run(lambda batch: loop.differentiate(batch, SHARES[how])[0], args=(first(loop),))
    total = loop.strategy.reduce("SUM", share)
    if loop.strategy.num_replicas_in_sync == 1:
        assert loop.strategy.reduce("MEAN", share) == total
        return
    with pytest.warns(
        UserWarning, match=r"the loss is their sum, and their mean is 1/4 of it. Write strategy.reduce\(\"SUM\""
    ) as said:
        assert loop.strategy.reduce("MEAN", {"loss": share})["loss"] == total / 4
    assert said[0].filename == __file__


def test_what_cannot_be_reduced(loop):
    rows = loop.strategy.run(lambda batch: batch[0], args=(first(loop),))
    assert loop.strategy.reduce("MEAN", 3.0) == 3.0
    assert loop.strategy.reduce("SUM", 0) == 0
    if loop.strategy.num_replicas_in_sync > 1:
        with pytest.raises(ValueError, match="their sum would be 4 times it"):
            loop.strategy.reduce("SUM", 3.0)
        with pytest.raises(ValueError, match=r"shapes \(2, 6\) and \(3, 6\).*axis=0"):
            loop.strategy.reduce("SUM", rows)
    with pytest.raises(ValueError, match='Write un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN"'):
        loop.strategy.reduce("MAX", rows)
    with pytest.raises(ValueError, match="axis=5 for values of rank 2"):
        loop.strategy.reduce("SUM", rows, axis=5)
    with pytest.raises(ValueError, match="Gather what strategy.run returned"):
        loop.strategy.gather(X, axis=0)


@pytest.mark.parametrize("dtype", ["int8", "bool", *slow("uint8", "int16")])
def test_short_integers_are_summed_as_numpy_does(dtype):
    strategy = on(1, 3)
    rows = np.full((8, 1), 100).astype(dtype)
    (batch,) = strategy.distribute_dataset([rows])
    value = strategy.run(lambda x: x, args=(batch,))
    assert strategy.reduce("SUM", value, axis=0).tolist() == rows.sum(0).tolist()
    np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=0), rows.mean(0))
    assert int(strategy.reduce("SUM", strategy.run(lambda rows: rows[0, 0] > 2, args=(batch,)))) == (0 if dtype == "bool" else 3)


def test_half_precision_is_summed_in_float32_and_double_precision_stays(loop):
    """Of numbers, where JAX has it: gradients are summed in float32, and such models refused."""
    value = loop.strategy.run(lambda: ops.cast(ops.ones((3,)) * 20000, "float16"))
    assert loop.strategy.reduce("MEAN", value).tolist() == [20000] * 3
    with jax.enable_x64(True):
        thirds = np.arange(12) / 3
        (batch,) = loop.strategy.distribute_dataset([thirds])
        mean = loop.strategy.reduce("SUM", loop.strategy.run(un.compute_average_loss, args=(batch,)))
        assert mean.dtype == "float64"
        np.testing.assert_allclose(mean, thirds.mean(), rtol=1e-15)


@settings(max_examples=cases(3, 15))
@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_gathered_rows_are_the_rows(rows, replicas, data):
    strategy = on(data.draw(st.integers(1, min(replicas, 8))), replicas)
    batch = next(iter(strategy.distribute_dataset([np.arange(rows)])))
    value = strategy.run(lambda batch: batch + 1, args=(batch,))
    assert strategy.gather(value, axis=0).tolist() == list(range(1, rows + 1))
    assert int(strategy.reduce("SUM", value, axis=0)) == sum(range(1, rows + 1))


def test_what_a_run_returns_goes_into_the_next(loop):
    """Also when the run before had other rows."""

    def second(values, total, batch=None):
        return ops.sum(values) + total + (0 if batch is None else ops.sum(batch[1]))

    for batch in batches(loop, X[:11], 8):
        values, total = loop.strategy.run(lambda batch: (batch[0] * 2, ops.sum(batch[0])), args=(batch,))
        both = loop.strategy.run(second, args=(values, total), kwargs={"batch": batch})
        alone = loop.strategy.run(second, args=(values, total))
        rows, numbers = np.concatenate(batch[0].values), np.concatenate(batch[1].values)
        np.testing.assert_allclose(loop.strategy.reduce("SUM", alone), 3 * rows.sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loop.strategy.reduce("SUM", both), 3 * rows.sum() + numbers.sum(), rtol=1e-4)


@pytest.mark.parametrize("eager", [True, *slow(False)])
def test_values_of_rows_go_into_the_next_run_of_a_function(eager):
    """Replicas have three rows and two; metrics see those of all."""
    strategy, x = on(2, 4), np.arange(10, dtype="float32")
    with strategy.scope():
        largest = keras.metrics.Mean()

    @un.function(eager=eager)
    def step(batch):
        doubled, counted = strategy.run(lambda rows: (2 * rows, ops.sum(rows)), args=(batch,))

        def add(rows, doubled, counted):
            largest.update_state(ops.max(rows + doubled))
            return ops.sum(rows + doubled) + counted

        return strategy.reduce("SUM", strategy.run(add, args=(batch, doubled, counted)), axis=None)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not compiled")
        (total,) = map(step, strategy.distribute_dataset([x]))
    assert (float(total), float(largest.result())) == (4 * x.sum(), 3 * x.max())


def test_no_arguments_no_strategy_and_older_names():
    assert un.get_replica_context() is None
    strategy = on(3, 4)
    value = strategy.run(lambda: un.get_replica_context().replica_id_in_sync_group + 1)
    assert strategy.reduce("SUM", value) == 10
    default = un.get_strategy()
    assert default.local_results(default.run(lambda x: x * 2, args=(3.0,)))[0] == 6
    (batch,) = strategy.experimental_distribute_dataset([X])
    assert len(strategy.experimental_local_results(strategy.experimental_run_v2(ops.sum, args=(batch,)))) == 4
