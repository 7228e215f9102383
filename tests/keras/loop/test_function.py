"""`un.function`: what is compiled as a whole, how often, and with which data."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from foreign_tensors import LentTensor, Tensor
from loops import CLASSES, Loop, crossentropy, data
from sizes import slow
from trainings import on
from unisono._src.keras.loop import function
from unisono._src.keras.loop.runs import RecentItems, count_event

X, Y = data("dense", 43)


def test_a_function_without_replicas_is_compiled_as_a_whole():
    model = keras.Sequential([layers.Dense(4, "relu"), layers.Dropout(0.5), layers.Dense(CLASSES)])
    optimizer, accuracy, loss_fn = keras.optimizers.Adam(), keras.metrics.SparseCategoricalAccuracy(), crossentropy(None)
    calls = []

    @un.function
    def step(x, y, training=True):
        calls.append(training)
        value, gradients = un.value_and_grad(lambda: loss_fn(y, model(x, training=training)), model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, model(x))
        return value

    losses = [float(step(X, Y)) for _ in range(30)]
    assert losses[-1] < losses[0]
    assert int(optimizer.iterations.value) == 30
    assert float(accuracy.count.value) == 30 * 43
    traced = len(calls)
    step(X, Y)
    assert len(calls) == traced
    step(X, Y, training=False)
    assert len(calls) > traced


def test_data_that_a_function_finds_by_itself():
    """Nothing of it is taken twice: an iterator and a shuffled dataset around the function, and behind enumerate; a generator."""
    strategy = on(1, 4)
    total = lambda batch: strategy.reduce("SUM", strategy.run(ops.sum, args=(batch,)))

    def dataset(rows=24, **options):
        return strategy.distribute_dataset(np.arange(rows, dtype="float32"), batch_size=8, **options)

    batches, calls = iter(dataset()), []
    step = un.function(lambda: (calls.append(1), total(next(batches)))[1])
    assert [float(step()) for _ in range(3)] == [28, 92, 156]
    assert len(calls) == 3
    numbered = un.function(lambda pairs: [(number, float(total(batch))) for number, batch in pairs])
    assert numbered(enumerate(dataset())) == [(0, 28), (1, 92), (2, 156)]
    shuffled, orders = dataset(shuffle=True), []
    epoch = un.function(lambda: [float(total(batch)) for batch in shuffled])
    for as_argument in (False, True):
        keras.utils.set_random_seed(3)
        orders.append(
            un.function(lambda data: [float(total(batch)) for batch in data])(dataset(shuffle=True)) if as_argument else epoch()
        )
    assert orders[0] == orders[1]
    assert shuffled.position == (1, 0)
    stream = strategy.distribute_dataset(np.arange(8.0) + number for number in range(3))
    assert un.function(lambda: [float(total(batch)) for batch in stream])() == [28, 36, 44]


class Held(dict):
    """No tree to JAX."""


def test_an_except_around_a_run_takes_nothing_away():
    strategy = on(1, 4)
    (batch,) = strategy.distribute_dataset([np.arange(8.0)])
    runs = {"step": strategy.run}  # so that nothing tells beforehand that replicas are run

    @un.function
    def careful(batch):
        try:
            return strategy.reduce("SUM", runs["step"](ops.sum, args=(batch["rows"],)))
        except Exception:
            return -1

    assert float(careful(Held(rows=batch))) == 28


class Trainer:
    factor = 3

    @un.function
    def scaled(self, x):
        """Times three."""
        return x * self.factor


def wrong(x):
    return float(x)


def test_a_function_is_named_like_what_it_compiles():
    assert Trainer.scaled.__doc__ == "Times three."
    assert float(Trainer().scaled(np.float32(2))) == 6
    with pytest.raises(ValueError, match="'wrong' could not be compiled.*neither float"):
        un.function(wrong)(np.float32(2))


def test_a_function_that_runs_replicas_without_arguments():
    strategy = on(2, 4)

    @un.function
    def numbers():
        return strategy.reduce("SUM", strategy.run(lambda: un.get_replica_context().replica_id_in_sync_group))

    assert [int(numbers()) for _ in range(3)] == [6, 6, 6]


@pytest.mark.parametrize("devices", [2, *slow(1)])
def test_a_whole_epoch_in_one_function_waits_for_nothing(devices, monkeypatch):
    """One device runs one program a step; of several, one runs replicas on all, one adds, and one ends the step. Nothing is fetched."""
    loop = Loop(on(devices, 4))
    dataset = loop.strategy.distribute_dataset((X[:36], Y[:36]), batch_size=12)
    loop.whole_epoch(dataset)
    asked = {"programs": 0, "fetched": 0}

    def counted(of, name, what):
        stock = of.__dict__[name]
        call = stock.fget if isinstance(stock, property) else stock

        def counting(*args, **kwargs):
            asked[what] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(of, name, property(counting) if isinstance(stock, property) else counting)

    array = type(jax.numpy.zeros(()))
    counted(jax.stages.Compiled, "__call__", "programs")
    for name in ("_value", "__array__", "__float__", "__int__", "__bool__", "block_until_ready"):
        counted(array, name, "fetched")
    total = loop.whole_epoch(dataset)
    steps = 3
    assert asked["programs"] == steps if devices == 1 else asked["programs"] <= steps * 3
    assert not asked["fetched"]
    assert np.isfinite(float(total))
    assert asked["fetched"]


# Tensors of other libraries


def tensors(library):
    """What makes a tensor of a library of an array."""
    if library == "tensorflow":
        return pytest.importorskip("tensorflow").constant
    if library == "torch":
        return pytest.importorskip("torch").tensor
    return {"array": Tensor, "dlpack": LentTensor}[library]


@pytest.mark.parametrize(
    "library",
    ["array", "dlpack", *(pytest.param(name, marks=pytest.mark.compat) for name in ("tensorflow", "torch"))],
)
def test_tensors_of_other_libraries_are_arrays(library):
    """For a function that is compiled as a whole, for `run`, `reduce` and fingerprints: a compilation for each shape, and no warning."""
    tensor, traced = tensors(library), []
    strategy = on(1, 2)
    weight = keras.Variable(2.0)

    @un.function
    def scaled(x, rate):
        traced.append(x["rows"].shape)
        return ops.sum(x["rows"]) * rate * weight

    results = [float(scaled({"rows": tensor(np.full(3, n, "float32"))}, tensor(np.float32(n)))) for n in range(5)]
    assert results == [3 * n * n * 2.0 for n in range(5)]
    assert len(set(traced)) == 1
    traced_once = len(traced)
    scaled({"rows": np.ones(3, "float32")}, np.float32(1))
    assert len(traced) == traced_once
    runs = [strategy.reduce("MEAN", strategy.run(lambda rate: rate * 2, args=(tensor(np.float32(n)),))) for n in (0, 3)]
    assert list(map(float, runs)) == [0, 6]
    one = tensor(np.float32(3))
    assert strategy.reduce("MEAN", one) is one
    assert un.fingerprint([tensor(np.arange(3.0))]) == un.fingerprint([np.arange(3.0)])


# Compilations.

CHANGING = {
    "numbers": (
        float,
        r"un.function has compiled 'step' 3 times for other values of x\['rate'\], of type float. Pass a number .* np.float32\(value\)",
    ),
    "objects": (
        lambda number: range(number + 1),
        r"for other values of x\['rate'\], of type range. Pass the same object each time, or the arrays in it",
    ),
}


@pytest.mark.parametrize("what", CHANGING)
def test_what_changes_from_call_to_call_is_named(what):
    make, said = CHANGING[what]

    @un.function
    def step(x):
        return x["rows"] * 2

    step({"rows": X, "rate": make(1)})
    step({"rows": X, "rate": make(2)})
    with pytest.warns(UserWarning, match=said):
        step({"rows": X, "rate": make(3)})


def test_a_function_keeps_few_compiled_forms(monkeypatch):
    monkeypatch.setattr(function, "MOST_TRACED", 2)
    traced = []

    def add_one(x):
        traced.append(x.shape)
        return x + 1

    compiled = un.function(add_one)
    for rows in (1, 2, 3):
        compiled(np.zeros(rows, np.float32))
    before = len(traced)
    compiled(np.zeros(3, np.float32))
    assert len(traced) == before
    compiled(np.zeros(1, np.float32))
    assert len(traced) > before


def test_the_items_that_were_used_longest_ago_are_forgotten():
    """And counts of what is asked for stay."""
    items, counts = RecentItems(2), RecentItems(2)
    items["a"], items["b"] = 1, 2
    items.move_to_end("a")
    items["c"] = 3
    assert dict(items) == {"a": 1, "c": 3}
    assert [count_event(counts, key) for key in "aabacaa"] == [1, 2, 1, 3, 1, 4, 5]
