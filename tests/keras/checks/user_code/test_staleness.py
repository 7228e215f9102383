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
from loops import CLASSES, Loop
from sizes import slow
from trainings import on
from unisono._src.keras.checks.user_code import staleness

STRATEGY = on(1, 2)
(ROWS,) = STRATEGY.distribute_dataset([np.ones(6, "float32")])


def run(code, *args, **kwargs):
    """What the code makes of six ones, by replicas."""
    return float(STRATEGY.reduce("SUM", STRATEGY.run(code, args=(ROWS, *args), kwargs=kwargs), axis=None))


class AttributeDict(dict):
    """Raises KeyError for an attribute that it does not have."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Base:
    factor = 1.0


class Factors(Base):
    inherited = 1.0


class Trainer:
    """Finds its factor as an attribute, as one of its class, or behind a property, through another method."""

    base = 1.0

    def __init__(self):
        self.factor = self.shift = 1.0

    @property
    def offset(self):
        return self.shift

    def scaled(self, rows):
        return ops.sum(rows) * self.factor * self.base * self.offset

    def step(self, rows):
        return self.scaled(rows)


def attribute(thing, name="factor"):
    """Code that finds an attribute of the thing, and what sets it."""
    return lambda rows: ops.sum(rows) * thing.factor, lambda value: setattr(thing, name, value)


def item(thing, key):
    return lambda rows: ops.sum(rows) * thing[key], lambda value: thing.__setitem__(key, value)


def deep_item():
    settings = {"deep": [{"factor": 1.0}]}
    return lambda rows: ops.sum(rows) * settings["deep"][0]["factor"], lambda value: settings["deep"][0].update(factor=value)


def length():
    ones = []
    return lambda rows: ops.sum(rows) * len(ones), lambda value: ones.__setitem__(slice(None), [1.0] * int(value))


def method(name, holder=None):
    trainer = Trainer()
    return trainer.step, lambda value: setattr(holder or trainer, name, value)


def inside(holder, array):
    return lambda rows: ops.sum(rows) * array(holder)[0], lambda value: array(holder).fill(value)


def enclosing():
    """Of a function that is called by another."""
    factor = 1.0

    def times(x):
        return x * factor

    def change(value):
        nonlocal factor
        factor = value

    return lambda rows: ops.sum(times(rows)), change


scale = 1.0


def scaled_by_name(rows):
    return ops.sum(rows) * scale


PLACES = {
    "a global name": lambda: (lambda rows: scaled_by_name(rows), lambda value: globals().update(scale=value)),
    "a variable of an enclosing function": enclosing,
    "a Namespace": lambda: attribute(argparse.Namespace()),
    "a SimpleNamespace": lambda: attribute(types.SimpleNamespace()),
    "a layer of Keras": lambda: attribute(layers.Flatten()),
    "a dict with attributes": lambda: attribute(AttributeDict()),
    "a dict of a user's kind": lambda: item(collections.UserDict(), "factor"),
    "a dict": lambda: item({}, "factor"),
    "a list": lambda: item([1.0], 0),
    "a list's length": length,
    "deep in a dict": deep_item,
    "a class": lambda: attribute(Base),
    "a class above": lambda: (lambda rows: ops.sum(rows) * Factors.factor, lambda value: setattr(Base, "factor", value)),
    "an attribute of the method's object": lambda: method("factor"),
    "a class of the method's object": lambda: method("base", Trainer),
    "what a property finds": lambda: method("shift"),
    "an array": lambda: inside(np.ones(3, "float32"), lambda array: array),
    "a replicated array": lambda: inside(un.replicate(np.ones(3, "float32")), lambda shared: shared.value),
    "an array in a dict": lambda: inside({"a": [np.ones(2, "float32")]}, lambda holder: holder["a"][0]),
}  # fmt: skip


QUICK_IN_REPLICAS = (
    "a global name", "a variable of an enclosing function", "a dict with attributes", "a list's length", "what a property finds", "an array",
)  # fmt: skip


@pytest.fixture
def as_before():
    yield
    Base.factor = Trainer.base = 1.0
    globals().update(scale=1.0)


@pytest.mark.usefixtures("as_before")
@pytest.mark.filterwarnings("ignore:.* has compiled")
@pytest.mark.parametrize(
    ("place", "way"),
    [
        *((place, "un.function") for place in PLACES),
        *((place, "run") for place in QUICK_IN_REPLICAS),
        ("deep in a dict", "run in un.function"),
        *slow(*((place, "run") for place in PLACES if place not in QUICK_IN_REPLICAS)),
    ],
)
def test_what_the_code_finds_is_looked_at_in_each_run(place, way):
    """By what is compiled as a whole, and by replica code."""
    code, change = PLACES[place]()
    change(2.0)
    compiled, results = un.function(code), []
    total = lambda: STRATEGY.reduce("SUM", STRATEGY.run(code, args=(ROWS,)), axis=None)
    call = {"run": total, "un.function": lambda: compiled(np.ones(6, "float32")), "run in un.function": un.function(total)}[way]
    for value in (2.0, 5.0, 2.0):
        change(value)
        results.append(float(call()))
    assert results == [12, 30, 12]


def scaled(x, settings):
    return scale_by(x, settings)


def scale_by(x, settings):
    return ops.sum(x) * settings.factor


WHOLE, FIRST = un.function(scaled), un.function(lambda x, factors: ops.sum(x) * factors[0])
WAYS = {
    "run": lambda settings: run(scaled, settings),
    "run, by a name and in a list": lambda settings: run(lambda x, *, kept: scaled(x, kept[0]), kept=[settings]),
    "functools.partial": lambda settings: run(functools.partial(scale_by, settings=settings)),
    "un.function": lambda settings: float(WHOLE(np.ones(6, "float32"), settings)),
    "un.function, a deque": lambda settings: float(FIRST(np.ones(6, "float32"), settings)),
}


@pytest.mark.filterwarnings("ignore:strategy.run has compiled")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_in_an_argument_is_looked_at_in_each_run(way):
    """JAX takes a deque for one leaf."""
    settings, results = collections.deque([1.0]) if "deque" in way else types.SimpleNamespace(), []
    for value in (2.0, 5.0, 2.0):
        settings.__setitem__(0, value) if "deque" in way else setattr(settings, "factor", value)
        results.append(WAYS[way](settings))
    assert results == [12, 30, 12]


def test_another_model_under_the_same_name():
    """As in a notebook whose cell is run again."""
    network = None
    code = lambda rows: ops.sum(network(rows[:, None]))
    for initializer, total in (("ones", 6), ("zeros", 0)):
        with STRATEGY.scope():
            network = keras.Sequential([layers.Dense(1, kernel_initializer=initializer)])
        assert run(code) == total


class Counting:
    """Code that counts its traces, in a number and in an array."""

    def __init__(self):
        self.traces, self.in_array = 0, np.zeros(1, "int32")

    def step(self, batch):
        self.traces += 1
        self.in_array[0] += 1
        return ops.sum(batch)

    @un.function
    def whole(self, x):
        self.traces += 1
        return x + 1


def test_code_that_counts_its_traces_is_not_compiled_for_every_step():
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


def test_what_is_compared_by_identity_and_what_by_value():
    """Large arrays, and those of other dtypes, are not looked through at every step; numbers that compute differently are not the same."""
    same = staleness.is_same_value
    snapshot = lambda value: staleness.snapshot_value(value, frozenset())
    many, around = [[0] * 20 for _ in range(20)], [1]
    around.append(around)
    for value in (np.zeros(2**14, "float32"), np.zeros(2), np.array(["text"]), many):  # JAX converts float64 once
        assert snapshot(value) is value
    one, other = np.zeros((2, 2, 3), "float32")[:, :, 0]
    assert [same(one, snapshot(one)), same(other, snapshot(one)), same(around, snapshot(around))] == [True, False, True]
    assert [same(-0.0, 0.0), same(True, 1), same(float("nan"), float("nan"))] == [False, False, True]


# Layers and optimizers.


def moved(loop):
    """How far a step on the first batch moves each dense layer."""
    kernels = lambda: [np.array(layer.kernel.value) for layer in loop.model.layers if isinstance(layer, layers.Dense)]
    before = kernels()
    loop.one(loop.first())
    return [float(np.linalg.norm(now - then)) for now, then in zip(kernels(), before, strict=True)]


def test_frozen_layers_stay_as_they_are():
    """Moving statistics too. A layer that is freed again trains on, with the program that it had."""

    def model():
        return keras.Sequential([layers.Input((6,)), layers.BatchNormalization(), layers.Dense(4), layers.Dense(CLASSES)])

    loop = Loop(on(1, 4), model)
    normalization, hidden = loop.model.layers[:2]
    assert min(moved(loop)) > 0
    normalization.trainable = hidden.trainable = False
    mean = np.array(normalization.moving_mean.value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Gradients do not exist")
        first, second = moved(loop)
    assert first == 0 < second
    np.testing.assert_array_equal(normalization.moving_mean.value, mean)
    normalization.trainable = hidden.trainable = True
    assert min(moved(loop)) > 0


SETTINGS = {
    "a number": ("learning_rate", 1e-9),
    "a schedule": ("learning_rate", keras.optimizers.schedules.ExponentialDecay(1e-9, 1, 0.5)),
    "clipping": ("clipvalue", 1e-9),
}


@pytest.mark.parametrize("what", ["a number", *slow("a schedule", "clipping")])
def test_settings_of_the_optimizer(what):
    loop = Loop(on(1, 4), optimizer=lambda: keras.optimizers.SGD(0.1))
    assert min(moved(loop)) > 1e-3
    setattr(loop.optimizer, *SETTINGS[what])
    assert max(moved(loop)) < 1e-7


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


def test_nothing_is_compiled_again_where_nothing_has_changed():
    loop, traced = Loop(on(1, 4)), []
    step = loop.step
    loop.step = lambda batch: (traced.append(1), step(batch))[1]
    batch = loop.first()
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
