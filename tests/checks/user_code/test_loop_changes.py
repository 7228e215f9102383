"""What is changed after a function was compiled counts in the next run, and is compiled once more at the most."""

import argparse
import collections
import functools
import types
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, data
from sizes import slow
from trainings import on
from unisono._src.checks.user_code import staleness

X, Y = data("dense", 24)


def batch_of(loop):
    return next(iter(loop.strategy.distribute_dataset((X[:12], Y[:12]), batch_size=12)))


def kernels(loop):
    return [np.array(layer.kernel.value) for layer in loop.model.layers if isinstance(layer, layers.Dense)]


def moved(loop, batch):
    before = kernels(loop)
    loop.one(batch)
    return [float(np.linalg.norm(now - then)) for now, then in zip(kernels(loop), before, strict=True)]


scale, network = 1.0, None


def scaled_by_name(batch):
    return ops.sum(network(batch[0])) * scale


def test_other_things_under_the_same_names():
    """As in a notebook whose cell is run again: here a model and a number, found through another function."""
    global network, scale
    strategy = on(1, 4)
    batch = next(iter(strategy.distribute_dataset((X, Y), batch_size=12)))

    def total():
        return float(strategy.reduce("SUM", strategy.run(lambda batch: scaled_by_name(batch), args=(batch,)), axis=None))

    try:
        with strategy.scope():
            network = keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
        ones, scale = total(), 3.0
        np.testing.assert_allclose(total(), 3 * ones, rtol=1e-5)
        with strategy.scope():
            network = keras.Sequential([layers.Dense(1, kernel_initializer="zeros")])
        assert total() == 0
    finally:
        network, scale = None, 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: argparse.Namespace(factor=2.0),
        lambda: types.SimpleNamespace(factor=2.0),
        lambda: layers.Flatten(),
        lambda: AttributeDict(factor=2.0),
    ],
)
def test_other_settings_on_an_object_of_a_library(make):
    strategy, settings = on(1, 2), make()
    batch = next(iter(strategy.distribute_dataset([np.ones(6, "float32")])))
    results = []
    for settings.factor in (2.0, 5.0, 2.0):
        total = strategy.run(lambda batch: ops.sum(batch) * settings.factor, args=(batch,))
        results.append(float(strategy.reduce("SUM", total, axis=None)))
    assert results == [12, 30, 12]


def test_other_items_of_a_dict_of_a_users_kind():
    strategy, settings = on(1, 2), collections.UserDict(factor=2.0)
    batch = next(iter(strategy.distribute_dataset([np.ones(6, "float32")])))
    results = []
    for settings["factor"] in (2.0, 5.0, 2.0):
        total = strategy.run(lambda batch: ops.sum(batch) * settings["factor"], args=(batch,))
        results.append(float(strategy.reduce("SUM", total, axis=None)))
    assert results == [12, 30, 12]


class AttributeDict(dict):
    """Raises KeyError for an attribute that it does not have."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def test_other_attributes_of_an_object():
    class Trainer:
        factor = 0.0

        def __init__(self):
            self.factor = 2.0

        def step(self, batch):
            return ops.sum(batch) * self.factor

    strategy, trainer = on(1, 2), Trainer()
    batch = next(iter(strategy.distribute_dataset([np.ones(6, "float32")])))
    results = []
    for trainer.factor in (2.0, 5.0, 2.0, 5.0):
        results.append(float(strategy.reduce("SUM", strategy.run(trainer.step, args=(batch,)), axis=None)))
    assert results == [12, 30, 12, 30]


@pytest.mark.filterwarnings("ignore:strategy.run has compiled")
@pytest.mark.parametrize("whole", [False, True], ids=["run", "un.function"])
def test_what_is_put_into_a_list_or_a_dict(whole):
    """The thing is the same one, and what is in it is not."""
    strategy = on(1, 4)
    settings, factors, inner = {"scale": 1.0}, [1.0], {"deep": [{"power": 1}]}
    batch = next(iter(strategy.distribute_dataset([np.full(8, 2, "float32")])))

    def code(rows):
        return ops.sum(rows ** inner["deep"][0]["power"]) * settings["scale"] * factors[0] * len(factors)

    def total():
        return strategy.reduce("SUM", strategy.run(code, args=(batch,)), axis=None)

    asked = un.function(total) if whole else total
    assert float(asked()) == 16
    settings["scale"] = 2.0
    assert float(asked()) == 32
    factors.append(0.0)
    assert float(asked()) == 64
    inner["deep"][0]["power"] = 2
    assert float(asked()) == 128


class Base:
    factor = 1.0


class Powers(Base):
    power = 1


@pytest.mark.parametrize("whole", [*slow(False), True], ids=["run", "un.function"])
def test_other_attributes_of_a_class_and_other_values_in_an_array(whole):
    strategy = on(1, 2)
    table, shared, inside = np.ones(3, "float32"), un.replicate(np.ones(3, "float32")), {"a": [np.ones(2, "float32")]}
    batch = next(iter(strategy.distribute_dataset([np.full(8, 2, "float32")])))

    def code(rows):
        rest = ops.sum(table) + ops.sum(shared.value) + ops.sum(inside["a"][0])
        return ops.sum(rows**Powers.power) * Powers.factor * ops.cast(rest, "float32")

    call = un.function(code) if whole else code

    def total():
        if whole:
            return float(call(np.full(8, 2, "float32")))
        return float(strategy.reduce("SUM", strategy.run(call, args=(batch,)), axis=None))

    def change_class():
        Base.factor = 3.0

    def change_power():
        Powers.power = 2

    changes = [change_class, change_power, lambda: table.fill(2), lambda: shared.value.fill(3), lambda: inside["a"][0].fill(-1)]
    try:
        seen = [total()]
        for change in changes:
            change()
            seen.append(total())
    finally:
        Base.factor, Powers.power = 1.0, 1
    assert seen == [16 * 8, 16 * 3 * 8, 32 * 3 * 8, 32 * 3 * 11, 32 * 3 * 17, 32 * 3 * 13]


def test_an_array_into_which_the_code_writes_in_its_trace_is_compared_by_identity():
    strategy, traces, seen = on(1, 2), np.zeros(1, "int32"), []
    batch = next(iter(strategy.distribute_dataset([np.ones(4, "float32")])))

    def code(rows):
        traces[0] += 1
        return ops.sum(rows)

    for _ in range(3):
        strategy.run(code, args=(batch,))
        seen.append(int(traces[0]))
    assert seen[0] == seen[1] == seen[2]


def test_arrays_that_are_large_or_of_other_dtypes_are_compared_by_identity():
    for array in (np.zeros(2**14, "float32"), np.zeros(2), np.array(["text"])):  # JAX converts float64 once
        assert staleness.snapshot_value(array, frozenset()) is array
    one, other = np.zeros((2, 2, 3), "float32")[:, :, 0]
    assert staleness.is_same_value(one, staleness.snapshot_value(one, frozenset()))
    assert not staleness.is_same_value(other, staleness.snapshot_value(one, frozenset()))


def test_numbers_that_compute_differently_are_not_the_same():
    assert not staleness.is_same_value(-0.0, 0.0)
    assert not staleness.is_same_value(True, 1)
    assert staleness.is_same_value(float("nan"), float("nan"))


def test_little_is_looked_through_at_every_step():
    assert isinstance(staleness.snapshot_value({"a": [1, 2], "b": 3}, frozenset()), staleness.CollectionSnapshot)
    many = [[0] * 20 for _ in range(20)]
    assert staleness.snapshot_value(many, frozenset()) is many
    around = [1]
    around.append(around)
    assert staleness.is_same_value(around, staleness.snapshot_value(around, frozenset()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:strategy.run has compiled")
def test_what_a_method_finds_through_another():
    """An attribute of the object, one of its class, one behind a property."""

    class Trainer:
        base = 1.0

        def __init__(self):
            self.factor = 2.0
            self.shift = 0.0

        @property
        def offset(self):
            return self.shift

        def scaled(self, rows):
            return ops.sum(rows) * self.factor * self.base + self.offset

        def step(self, rows):
            return self.scaled(rows)

    strategy, trainer = on(1, 2), Trainer()
    batch = next(iter(strategy.distribute_dataset([np.ones(6, "float32")])))

    def total():
        return float(strategy.reduce("SUM", strategy.run(trainer.step, args=(batch,)), axis=None))

    assert total() == 12
    trainer.factor = 3.0
    assert total() == 18
    Trainer.base = 2.0
    assert total() == 36
    trainer.shift = 1.0
    assert total() == 38


def test_a_variable_of_an_enclosing_function():
    """Of a function that is called by another: by one that is compiled as a whole, and by replica code."""
    factor = 2.0

    def times(x):
        return x * factor

    @un.function
    def whole(x):
        return times(x)

    strategy = on(1, 2)
    batch = next(iter(strategy.distribute_dataset([np.ones(6, "float32")])))
    step = lambda rows: ops.sum(times(rows))

    def results():
        return float(whole(np.float32(1))), float(strategy.reduce("SUM", strategy.run(step, args=(batch,))))

    assert results() == (2, 12)
    factor = 5.0
    assert results() == (5, 30)


def test_frozen_layers_stay_as_they_are():
    """Moving statistics too. A layer that is freed again trains on, with the program that it had."""

    def model():
        return keras.Sequential([layers.Input((6,)), layers.BatchNormalization(), layers.Dense(4), layers.Dense(CLASSES)])

    loop = Loop(on(1, 4), model)
    normalization, hidden = loop.model.layers[:2]
    batch = batch_of(loop)
    assert min(moved(loop, batch)) > 0
    normalization.trainable = hidden.trainable = False
    mean = np.array(normalization.moving_mean.value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Gradients do not exist")
        first, second = moved(loop, batch)
    assert first == 0 < second
    np.testing.assert_array_equal(normalization.moving_mean.value, mean)
    normalization.trainable = hidden.trainable = True
    assert min(moved(loop, batch)) > 0


@pytest.mark.parametrize("what", ["a number", *slow("a schedule", "clipping")])
def test_settings_of_the_optimizer(what):
    loop = Loop(on(1, 4), optimizer=lambda: keras.optimizers.SGD(0.1))
    batch = batch_of(loop)
    assert min(moved(loop, batch)) > 1e-3
    if what == "a number":
        loop.optimizer.learning_rate = 1e-9
    elif what == "a schedule":
        loop.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(1e-9, 1, 0.5)
    else:
        loop.optimizer.clipvalue = 1e-9
    assert max(moved(loop, batch)) < 1e-7


def test_a_function_that_is_compiled_as_a_whole_sees_changes_too():
    class Model:
        def __init__(self):
            self.factor = 1.0

        @un.function
        def times(self, x):
            return x * self.factor

    model = Model()
    results = []
    for model.factor in (2.0, 3.0):
        results.append(float(model.times(np.float32(5))))
    assert results == [10, 15]


@pytest.mark.parametrize("what", ["clipping", "a frozen weight", "a schedule of the model's optimizer"])
def test_a_function_that_is_compiled_as_a_whole_sees_other_settings(what):
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5))
    optimizer = model.optimizer
    kernel, bias = model.trainable_variables
    gradients = [np.full(variable.shape, 4, "float32") for variable in (kernel, bias)]

    @un.function
    def update():
        (optimizer if what == "clipping" else model.optimizer).apply(gradients, [kernel, bias])
        return kernel.trainable

    update()
    before = np.array(kernel.value)
    if what == "clipping":
        optimizer.clipvalue = 1.0
    elif what == "a frozen weight":
        kernel.trainable = False
    else:
        optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.125, 1, 1.0)
    trainable = update()
    moved = {"clipping": 0.5, "a frozen weight": 2.0, "a schedule of the model's optimizer": 0.5}[what]
    np.testing.assert_allclose(before - np.asarray(kernel.value), moved, rtol=1e-6)
    assert bool(trainable) is (what != "a frozen weight")
    optimizer.lr = 0.1
    with pytest.raises(AttributeError, match="optimizer.lr was set"):
        update()


class Settings:
    def __init__(self):
        self.factor = 1.0


def scaled(x, settings):
    return scale_by(x, settings)


def scale_by(x, settings):
    return ops.sum(x) * settings.factor


STRATEGY = on(1, 2)
WAYS = {
    "run": lambda x, settings: STRATEGY.run(scaled, args=(x, settings)),
    "run, by a name and in a list": lambda x, settings: STRATEGY.run(
        lambda x, *, kept: scaled(x, kept[0]), args=(x,), kwargs={"kept": [settings]}
    ),
    "functools.partial": lambda x, settings: STRATEGY.run(functools.partial(scale_by, settings=settings), args=(x,)),
}


@pytest.mark.filterwarnings("ignore:strategy.run has compiled")
@pytest.mark.parametrize("way", WAYS)
def test_other_attributes_of_an_argument(way):
    settings = Settings()
    batch = next(iter(STRATEGY.distribute_dataset([np.ones(6, "float32")])))
    results = []
    for settings.factor in (2.0, 5.0, 2.0):
        results.append(float(STRATEGY.reduce("SUM", WAYS[way](batch, settings), axis=None)))
    assert results == [12, 30, 12]


def test_other_attributes_of_an_argument_of_a_function_that_is_compiled_as_a_whole():
    settings, whole = Settings(), un.function(scaled)
    results = []
    for settings.factor in (2.0, 5.0, 2.0):
        results.append(float(whole(np.ones(6, "float32"), settings)))
    assert results == [12, 30, 12]


def test_other_items_of_an_argument_that_is_no_tree():
    """JAX takes a deque for one leaf."""
    factors = collections.deque([1.0])
    times = un.function(lambda x, factors: x * factors[0])
    results = []
    for factors[0] in (2.0, 5.0):
        results.append(float(times(np.float32(1), factors)))
    assert results == [2, 5]


def test_nothing_is_compiled_again_where_nothing_has_changed():
    loop, traced = Loop(on(1, 4)), []
    step = loop.step
    loop.step = lambda batch: (traced.append(1), step(batch))[1]
    batch = batch_of(loop)
    loop.one(batch)
    count = len(traced)
    for rate in (0.1, 0.2):  # a learning rate is a variable
        loop.optimizer.learning_rate = rate
        loop.one(batch)
    assert len(traced) == count
    loop.optimizer.clipvalue = 1.0
    loop.one(batch)
    again = len(traced)
    assert again > count
    for loop.optimizer.clipvalue in (None, 1.0):
        loop.one(batch)
    assert len(traced) == again


def test_code_that_counts_its_traces_is_not_compiled_for_every_step():
    class Counting:
        def __init__(self):
            self.traces = 0

        def step(self, batch):
            self.traces += 1
            return ops.sum(batch)

        @un.function
        def whole(self, x):
            self.traces += 1
            return x + 1

    strategy, counting, seen = on(2, 4), Counting(), []
    for _ in range(2):
        for batch in strategy.distribute_dataset(np.arange(23.0), batch_size=8):
            strategy.run(counting.step, args=(batch,))
        seen.append(counting.traces)
    for _ in range(3):
        counting.whole(np.float32(1))
        seen.append(counting.traces)
    first, second, *whole = seen
    assert first == second < whole[0] == whole[1] == whole[2]
