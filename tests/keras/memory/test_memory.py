"""`strategy.memory` tells what a training holds and needs, and changes nothing of it."""

from __future__ import annotations

import gc
import json

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from trainings import on
from unisono._src.engine.xla import programs
from unisono._src.keras.memory.described_batch import describe_batch
from unisono._src.keras.memory.report import DeviceMemory, MemoryChoice, MemoryReport, format_report

WIDE = 512
ROWS = 64


def make_wide(strategy, optimizer="adam", loss="sparse_categorical_crossentropy", **compiled):
    """A model whose weights are larger than what a step holds beside them."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([layers.Input((128,)), layers.Dense(WIDE, "relu"), layers.Dense(10, "softmax")])
    model.compile(optimizer, loss, **compiled)
    return model


X = np.random.default_rng(0).normal(size=(2 * ROWS, 128)).astype("float32")
Y = np.arange(2 * ROWS) % 10


class CountArrays(keras.callbacks.Callback):
    """Counts the bytes of the arrays on each device that were not there before."""

    def __init__(self):
        super().__init__()
        gc.collect()
        self.before = {id(array) for array in jax.live_arrays()}
        self.kept = jax.live_arrays()  # so that no other gets its id
        self.found = {}

    def on_train_batch_end(self, batch, logs=None):
        gc.collect()
        new = (array for array in jax.live_arrays() if id(array) not in self.before)
        # Of arrays over several devices, Keras has the lead's in the same memory.
        blocks = {
            (each.device, each.data.unsafe_buffer_pointer()): each.data.nbytes for one in new for each in one.addressable_shards
        }
        self.found = {}
        for (device, _), size in blocks.items():
            name = f"{device.platform}:{device.id}"
            self.found[name] = self.found.get(name, 0) + size


@pytest.mark.parametrize(("devices", "options"), [(1, {}), (2, {}), (4, {"shard": "frozen"})])
def test_what_is_held_on_each_device_is_what_lives_there(devices, options):
    count = CountArrays()
    strategy = un.MirroredStrategy(devices=devices, replicas=4, **options)
    model = make_wide(strategy, metrics=["accuracy"])
    model.layers[0].trainable = not options
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    own = strategy.memory(model, ROWS, replicas=[4]).own
    model.fit(X, Y, batch_size=ROWS, verbose=0, callbacks=[count])
    assert set(own.devices) == set(count.found) == {f"cpu:{device}" for device in range(devices)}
    for name, memory in own.devices.items():
        assert memory.held == pytest.approx(count.found[name], rel=0.1)


def test_a_training_compiles_nothing_anew_and_has_the_same_bits(monkeypatch):
    plain = make_wide(on(2, 4))
    plain.fit(X, Y, batch_size=ROWS, verbose=0)
    programs.forget_shared_programs()
    strategy = on(2, 4)
    model = make_wide(strategy)
    begin = model.get_weights()
    strategy.memory(model, ROWS, replicas=[4])
    assert all(map(np.array_equal, model.get_weights(), begin))
    compiled = []
    monkeypatch.setattr(programs, "load_or_compile", lambda lowered, text, device: compiled.append(text))
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    assert compiled == []
    assert un.fingerprint(model) == un.fingerprint(plain)


def test_more_replicas_have_smaller_activations_and_more_sums():
    strategy = un.OneDeviceStrategy(replicas=8)
    model = make_wide(strategy, optimizer=keras.optimizers.SGD(momentum=0.9))
    report = strategy.memory(model, 4096, replicas=[1, 8, 64])
    one, eight, more = (choice.devices["cpu:0"] for choice in report.choices)
    parameters = 4 * model.count_params()
    assert [choice.rows for choice in report.choices] == [4096, 512, 64]
    assert [choice.is_own for choice in report.choices] == [False, True, False]
    assert one.weights == eight.weights == parameters
    assert one.optimizer == pytest.approx(parameters, rel=0.01)
    assert one.gradients == 0
    assert (eight.gradients, more.gradients) == (pytest.approx(3 * parameters, rel=0.02), pytest.approx(6 * parameters, rel=0.02))
    assert one.activations > 4096 * WIDE * 4 > eight.activations > 512 * WIDE * 4
    assert eight.activations > more.activations
    assert json.loads(report.to_json())["choices"][1]["devices"]["cpu:0"]["total"] == eight.total


def test_sums_are_folded_in_place():
    """The step asks for no more copies of a gradient than that of the replica that runs."""
    strategy = on(1, 8)
    model = make_wide(strategy)
    memory = strategy.memory(model, 8, replicas=[8]).own.devices["cpu:0"]
    assert memory.activations < 1.5 * 4 * model.count_params()


def test_remat_shows_in_the_activations():
    """Not as fewer bytes: on CPU, XLA computes such layers again early, in plain Keras too."""
    found = []
    strategy = on(1, 2)
    for mode in (None, "full"):
        with strategy.scope(), keras.RematScope(mode=mode):
            deep = [layers.Dense(128, "tanh") for _ in range(6)]
            model = keras.Sequential([layers.Input((128,)), *deep, layers.Dense(1)])
        model.compile("sgd", "mse")
        found.append(strategy.memory(model, 4096, replicas=[2]).own.devices["cpu:0"].activations)
    plain, remat = found
    assert remat != pytest.approx(plain, rel=0.2)


class OfOtherRows(layers.Layer):
    def call(self, x):
        return x @ keras.ops.transpose(x) @ x / 100


def test_gathered_rows_are_told_with_their_layer():
    strategy = on(1, 2)
    with strategy.scope():
        model = keras.Sequential([layers.Input((32,)), OfOtherRows(name="pairs"), layers.Dense(1)])
    model.compile("sgd", "mse")
    report = strategy.memory(model, ROWS, replicas=[2])
    assert set(report.own.layers) == {"pairs"}
    assert report.own.devices["cpu:0"].gathered >= ROWS * 32 * 4
    assert "The layer 'pairs' looks at other rows of the batch: 0.0 MiB are gathered." in str(report)
    assert "gathered" in str(report).splitlines()[2]


def test_by_default_the_own_r_is_between_its_neighbours():
    strategy = on(2, 4)
    model = make_wide(strategy)
    assert [choice.replicas for choice in strategy.memory(model, 4).choices] == [2, 4]
    with strategy.scope():
        x = layers.Input((128,), batch_size=2)
        fixed = keras.Model(x, layers.Dense(10, "softmax")(x))
    fixed.compile("sgd", "sparse_categorical_crossentropy")
    assert [choice.replicas for choice in strategy.memory(fixed, 8).choices] == [4]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x["a"])


def make_subclassed(strategy, build=True):
    with strategy.scope():
        model = Subclassed()
    model.compile("sgd", "mse")
    if build:
        model({"a": np.zeros((1, 4), "float32")})
    return model


def test_a_subclassed_model_is_given_a_row():
    strategy = on(1, 2)
    report = strategy.memory(make_subclassed(strategy), 8, x={"a": jax.ShapeDtypeStruct((1, 4), "float32")}, replicas=[2])
    assert report.own.devices["cpu:0"].weights == 4 * (4 * 3 + 3)


STRATEGY = on(2, 4)


def make_open(strategy):
    with strategy.scope():
        model = keras.Sequential([layers.Input((None, 4), name="words"), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def make_uncompiled(strategy):
    with strategy.scope():
        return keras.Sequential([layers.Input((4,)), layers.Dense(1)])


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda _: make_wide(on(1, 4)), {}, "was not made in the scope of <MirroredStrategy: 4 replicas on 2 cpu devices>"),
        (make_uncompiled, {}, r"is not compiled: the optimizer has a part of the memory. Write model.compile\(...\) first"),
        (
            lambda of: make_subclassed(of, build=False),
            {},
            "is not built, so that its weights have no shapes yet. Give it a keras.Input",
        ),
        (lambda of: make_wide(of, run_eagerly=True), {}, r"steps are not compiled \(run_eagerly=True\)"),
        (make_subclassed, {}, r"is a subclassed one \(Subclassed\), which does not know .* Write strategy.memory"),
        (make_open, {}, r"The input 'words' has the shape \(None, None, 4\), whose lengths are not all known"),
        (make_wide, {"x": 3}, r"x= received 3 of type int. Give arrays whose first axis counts rows"),
        (make_wide, {"x": np.array(["a"])}, r"x= received an array of dtype <U1, which no device can hold"),
        (make_wide, {"replicas": [1, 4]}, r"from 2 \(one for each device\) to 16 \(the rows of a batch\); received \[1\]"),
        (make_wide, {"replicas": [32]}, r"received \[32\]"),
        (make_wide, {"batch_size": 0}, r"batch_size must be a whole number of 1 or more; received 0"),
    ],
)
def test_what_cannot_be_told_is_refused(make, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        STRATEGY.memory(make(STRATEGY), **{"batch_size": 16, **arguments})


def test_a_platform_that_tells_nothing_of_programs_is_named(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda compiled: None)
    with pytest.raises(
        RuntimeError, match=r"XLA does not tell the memory of a program for cpu, .* start the program with JAX_PLATFORMS=cpu"
    ):
        STRATEGY.memory(make_wide(STRATEGY), 16, replicas=[4])


def test_labels_of_another_shape_are_to_be_given():
    model = make_wide(STRATEGY, loss=lambda y, p: keras.losses.mean_squared_error(keras.ops.reshape(y, (-1, 1, 2)), p))
    with pytest.raises(ValueError) as error:  # noqa: PT011  # of JAX; the note is ours
        STRATEGY.memory(model, 16, replicas=[4])
    assert any("If they are others, write y=y[:1], with a row of data" in note for note in error.value.__notes__)


def outputs_of(structure):
    x = keras.Input((6,))
    dense = {name: layers.Dense(3, name=name)(x) for name in "ab"}
    return keras.Model(x, structure(dense))


@pytest.mark.parametrize(
    ("outputs", "loss", "labels"),
    [
        (lambda of: of["a"], "sparse_categorical_crossentropy", ((8,), "int32")),
        (lambda of: of["a"], keras.losses.SparseCategoricalCrossentropy(), ((8,), "int32")),
        (lambda of: of["a"], "mse", ((8, 3), "float32")),
        (lambda of: of, {"b": "mse", "a": "sparse_categorical_crossentropy"}, {"a": ((8,), "int32"), "b": ((8, 3), "float32")}),
        (lambda of: [*of.values()], ["mse", "sparse_categorical_crossentropy"], [((8, 3), "float32"), ((8,), "int32")]),
        (lambda of: [*of.values()], {"b": "sparse_categorical_crossentropy"}, [((8, 3), "float32"), ((8,), "int32")]),
    ],
    ids=["name", "object", "of one output", "of a dict", "of a list", "of one of two"],
)
def test_labels_are_derived_from_losses(outputs, loss, labels):
    model = outputs_of(outputs)
    model.compile("sgd", loss)
    batch = describe_batch(model, 8, None, None, None, is_cut=True)
    described = jax.tree.map(lambda array: (array.shape, str(array.dtype)), batch.tree())
    assert described == (((8, 6), "float32"), labels)


MEMORY = DeviceMemory(2**20, 2 * 2**20, 3 * 2**20, 0, 0, 5 * 2**20, 2**19, 2**19)


def test_the_table_joins_equal_devices_and_says_what_fits():
    other = DeviceMemory(2**20, 2 * 2**20, 3 * 2**20, 0, 0, 2**20, 2**19, 2**19)
    choices = [
        MemoryChoice(1, False, 8, {"gpu:0": MEMORY, "gpu:1": MEMORY}, {}),
        MemoryChoice(4, True, 2, {"gpu:0": other, "gpu:1": MEMORY}, {}),
    ]
    report = MemoryReport("net", 8, choices, dict.fromkeys(("gpu:0", "gpu:1"), 10 * 2**20))
    lines = list(format_report(report))
    assert lines[2].split() == [
        "R", "rows", "device", "weights", "optimizer", "gradients", "activations", "batch", "ahead", "total", "fits"
    ]  # fmt: skip
    assert " ".join(lines[3].split()) == "1 8 gpu:0 to gpu:1 1.0 2.0 3.0 5.0 0.5 0.5 12.0 no"
    assert " ".join(lines[4].split()) == "* 4 2 gpu:0 1.0 2.0 3.0 1.0 0.5 0.5 8.0 yes"
    assert " ".join(lines[5].split()) == "* 4 2 gpu:1 1.0 2.0 3.0 5.0 0.5 0.5 12.0 no"
    assert lines[-1] == "JAX has 10.0 MiB on gpu:0 to gpu:1."
    assert report.own.devices["gpu:0"].total == sum((1, 2, 3, 1, 1)) * 2**20
    assert json.loads(report.to_json())["limits"]["gpu:1"] == 10 * 2**20
    with pytest.raises(ValueError, match=r"has no row of the strategy's own R; it has \[1\]. Write replicas=\[..., R\]"):
        _ = MemoryReport("net", 8, choices[:1], {}).own
