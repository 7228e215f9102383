"""What grows with the rows has values of rows, and all else is a number: whatever `ops.squeeze` makes of one row, or `keepdims` of a sum."""

import warnings

import keras
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from keras import ops

import unisono as un
from sizes import cases, mostly_slow, slow
from trainings import on


def train(strategy, batches, step):
    """Return (losses, the variable after each step, the mean, its count) of a loop over batches."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        factor = keras.Variable(1.0, name="factor")
        optimizer = keras.optimizers.SGD(0.01)
        mean = keras.metrics.Mean()
    run = un.function(lambda batch: strategy.run(step, args=(batch, factor, optimizer, mean)))
    losses, factors = [], []
    for batch in strategy.distribute_dataset(batches):
        losses.append(float(strategy.reduce("SUM", run(batch), axis=None)))
        factors.append(float(factor.value))
    return losses, factors, float(mean.result()), float(mean.count)


def squeezed(x, factor, optimizer, mean):
    """Where there is one row, the losses and the values for the mean are numbers."""
    mean.update_state(ops.squeeze(x))
    loss, gradients = un.value_and_grad(lambda: ops.squeeze(factor * x) ** 2, [factor])
    optimizer.apply(gradients, [factor])
    return loss


def weighted(x, factor, optimizer, mean):
    mean.update_state(ops.squeeze(x))
    loss, gradients = un.value_and_grad(lambda: (ops.squeeze(factor * x), ops.squeeze(ops.abs(x)) + 1), [factor])
    optimizer.apply(gradients, [factor])
    return loss


def averaged(x, factor, optimizer, mean):
    mean.update_state(ops.squeeze(x))
    loss, gradients = un.value_and_grad(lambda: un.compute_average_loss(ops.squeeze(factor * x)), [factor])
    optimizer.apply(gradients, [factor])
    return loss


def summed(x, factor, optimizer, mean):
    """A number for any rows: it is taken as it is."""
    mean.update_state(x[:, 0])
    loss, gradients = un.value_and_grad(lambda: ops.sum(factor * x) / 8, [factor])
    optimizer.apply(gradients, [factor])
    return loss


def kept(x, factor, optimizer, mean):
    """The sum with its axes is a number too, and so is what a mean is fed with."""
    mean.update_state(ops.mean(x, keepdims=True))
    loss, gradients = un.value_and_grad(lambda: ops.sum(factor * x, keepdims=True) * (1 / 8), [factor])
    optimizer.apply(gradients, [factor])
    return loss


def of_two_places(x, factor, optimizer, mean):
    """Replicas may have two rows as well."""
    mean.update_state(x[:, 0])
    loss, gradients = un.value_and_grad(
        lambda: ops.sum(ops.concatenate([0.25 * factor * x, 0.75 * factor * x], 1), axis=0) / 8, [factor]
    )
    optimizer.apply(gradients, [factor])
    return loss


@pytest.mark.parametrize("step", [squeezed, weighted, kept, of_two_places, *slow(averaged, summed)])
@settings(max_examples=20, phases=cases([Phase.explicit], list(Phase)))
@example([9, 3], 7, 2)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=3), st.integers(2, 9), st.integers(1, 3))
def test_one_row_is_a_row(step, sizes, replicas, devices):
    """Some replicas have one row, others more or none, and plain Keras all rows."""
    are_numbers = step in (summed, kept, of_two_places)
    sizes = [8] * len(sizes) if are_numbers else sizes
    draw = np.random.default_rng(sum(sizes))
    batches = [draw.normal(size=(size, 1)).astype("float32") for size in sizes]
    plain = train(on(1, 1), batches, step)
    if are_numbers:  # a sum over the rows, in three shapes
        np.testing.assert_allclose(plain[:2], train(on(1, 1), batches, summed)[:2], rtol=1e-5, atol=1e-6)
    ours = train(on(min(devices, replicas), replicas), batches, step)
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "eager"), [(4, False), (8, True), *slow((8, False), (4, True))])
def test_a_loss_of_as_many_values_as_a_replica_has_rows(rows, eager):
    """They are sums over the rows, so that they are added up, of one row and of two."""
    strategy = on(1, 4)
    x = np.arange(rows * rows // 4, dtype="float32").reshape(rows, rows // 4)

    @un.function(eager=eager)
    def run(batch):
        return strategy.run(lambda x: un.value_and_grad(lambda: ops.sum(x, axis=0), [])[0], args=(batch,))

    (batch,) = strategy.distribute_dataset([x])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*steps? .*not compiled|.*is not compiled")
        assert float(strategy.reduce("SUM", run(batch), axis=None)) == x.sum()


def test_code_for_one_row_alone_is_told_that_all_rows_are_traced():
    strategy = on(1, 4)

    def step(x):
        return un.value_and_grad(lambda: ops.reshape(x, ()) * 1.0, [])[0] if x.shape[0] == 1 else 1 / 0

    (batch,) = strategy.distribute_dataset([np.arange(4, dtype="float32")[:, None]])
    with pytest.raises(ZeroDivisionError) as caught:
        strategy.run(step, args=(batch,))
    note = str(caught.value.__notes__)
    assert "'step' is traced for the rows of a replica, and for all rows of the global batch" in note
    assert "The error comes of 4 rows, of a global batch of 4. Replica code must not fix the number of rows" in note


@pytest.mark.parametrize("rows", [4, 5, 8])
def test_what_the_code_returns_of_one_row_has_its_axis(rows):
    strategy = on(1, 4)
    x = np.arange(rows, dtype="float32")
    (batch,) = strategy.distribute_dataset([x[:, None]])
    values, total = strategy.run(lambda x: (ops.squeeze(x), ops.sum(x)), args=(batch,))
    assert strategy.gather(values, axis=0).tolist() == x.tolist()
    assert float(strategy.reduce("SUM", values, axis=0)) == float(strategy.reduce("SUM", total, axis=None)) == x.sum()


SHAPES = [(6, 3, 2), *slow(((6, 1),), ((6, 3),), ((4, 4),))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("replicas", mostly_slow([1, 2, 3, 6], 3))
@pytest.mark.parametrize("how", ["tuple", "average"])
def test_weights_of_examples_hold_for_all_values_of_an_example(shape, replicas, how):
    """Also where a replica has as many rows as an example has values."""
    values = np.random.default_rng(0).normal(size=shape).astype("float32")
    weights = np.arange(1, shape[0] + 1, dtype="float32")
    whole = np.broadcast_to(weights.reshape(-1, *[1] * (len(shape) - 1)), shape)
    expected = np.sum(values * whole) / (np.sum(whole) if how == "tuple" else shape[0])
    strategy = on(1, replicas)
    with strategy.scope():
        factor = keras.Variable(1.0)

    def step(batch):
        x, w = batch
        if how == "tuple":
            return un.value_and_grad(lambda: (factor * x, w), [factor])[0]
        return un.compute_average_loss(x, sample_weight=w)

    for given_weights in (weights, weights[:, None]):
        (batch,) = strategy.distribute_dataset([(values, given_weights)])
        loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_replica_divides_by_half_of_its_rows():
    """As the gradient of a variance does. No trace is of one row: the number for one follows from those of others."""
    strategy = on(1, 4)
    (batch,) = strategy.distribute_dataset([(np.arange(1, 11, dtype="float32").reshape(5, 2),)])
    doubled = strategy.run(lambda x: ops.sum(x) * (2 / len(x)), args=batch)
    assert [float(value) for value in strategy.local_results(doubled)] == [10, 22, 30, 38]
