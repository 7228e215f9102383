"""TensorBoard: its files hold what Keras' callback writes by TensorFlow, and a resumed training goes on in them."""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import io
import json
import os
import pathlib
import signal
import struct
import sys
import zlib

import jax
import keras
import numpy as np
import pytest
from keras import layers

from sizes import BATCH, ROWS, STEPS, slow
from trainings import fitting, on, rows, run
from unisono._src.tensorboard import weight_summaries
from unisono._src.tensorboard.batch_count import Speed
from unisono._src.tensorboard.callback import TensorBoard
from unisono._src.tensorboard.layer_graph import Node, build_nodes
from unisono._src.tensorboard.profiling import Profile
from unisono.callbacks import BackupAndRestore

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
graph_pb2 = pytest.importorskip("tensorboardX.proto.graph_pb2")
record_writer = pytest.importorskip("tensorboardX.record_writer")

X, Y = rows(ROWS, 6), rows(ROWS, 2, seed=1)
VALIDATION = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": 4}
EPOCHS = 3
EVERYWHERE = pytest.mark.parametrize(
    "strategy", [None, lambda: on(3), *slow(lambda: on(1))], ids=["plain", "three devices", "one device"]
)
ON_DEVICES = pytest.mark.parametrize(
    "strategy", [lambda: on(3), *slow(None, lambda: on(1))], ids=["three devices", "plain", "one device"]
)
"""In `make test` without plain Keras, for what it sees as our fit does."""


def regressor(optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.5), **options):
    def make():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh", name="first"), layers.Dense(2, name="second")])
        model.compile(optimizer(), "mse", metrics=["mae"], **options)
        return model

    return make


def trained(directory, strategy=None, make=None, callbacks=(), epochs=EPOCHS, more=None, **options):
    """A run whose TensorBoard has these options."""
    board = TensorBoard(directory, **options)
    fit = fitting(X, Y, batch_size=BATCH, epochs=epochs, callbacks=[*callbacks, board], **(more or {}))
    return run(make or regressor(), fit, None if strategy is None else strategy())


def events(directory):
    """Of all files in a directory in the order of their names, with their digests checked."""
    for path in sorted(pathlib.Path(directory).glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            header, (length,) = data[start : start + 8], struct.unpack_from("<Q", data, start)
            record = data[start + 12 : start + 12 + length]
            digests = struct.unpack_from("<I", data, start + 8) + struct.unpack_from("<I", data, start + 12 + length)
            assert digests == (record_writer.masked_crc32c(header), record_writer.masked_crc32c(record))
            yield event_pb2.Event.FromString(record)
            start += 16 + length


def values(directory):
    return [(event.step, value) for event in events(directory) for value in event.summary.value]


def scalars(directory):
    """{tag: {step: number}}, none of them written twice."""
    found = {}
    for step, value in values(directory):
        if value.HasField("simple_value"):
            assert step not in found.setdefault(value.tag, {}), f"{value.tag} of step {step} twice"
            found[value.tag][step] = value.simple_value
    return found


def tensors(directory):
    """{(tag, plugin): {step: tensor}}."""
    found = {}
    for step, value in values(directory):
        if value.HasField("tensor"):
            found.setdefault((value.tag, value.metadata.plugin_data.plugin_name), {})[step] = value.tensor
    return found


def array_in(tensor):
    return np.frombuffer(tensor.tensor_content, "<f8").reshape([dim.size for dim in tensor.tensor_shape.dim])


def without_speed(found):
    return {tag: numbers for tag, numbers in found.items() if not tag.endswith("_per_second")}


# --- numbers ----------------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_epochs_are_the_history(tmp_path, strategy):
    logs = trained(tmp_path, strategy, more=VALIDATION, write_steps_per_second=True).logs
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(train) == {f"epoch_{name}" for name in ("loss", "mae", "learning_rate", "steps_per_second", "images_per_second")}
    assert set(validation) == {"epoch_loss", "epoch_mae", "evaluation_loss_vs_iterations", "evaluation_mae_vs_iterations"}
    for name in ("loss", "mae"):
        assert train[f"epoch_{name}"] == dict(enumerate(logs[name]))
        assert validation[f"epoch_{name}"] == dict(enumerate(logs[f"val_{name}"]))
        assert validation[f"evaluation_{name}_vs_iterations"] == dict(zip((5, 10, 15), logs[f"val_{name}"], strict=True))
    assert train["epoch_learning_rate"] == dict.fromkeys(range(EPOCHS), np.float32(0.1))


@EVERYWHERE
@pytest.mark.parametrize("every", [2, *slow("batch", 7)])
def test_batches_are_what_callbacks_see_one_at_a_time(tmp_path, strategy, every):
    """Our fit takes several at once, and shows callbacks older logs in between."""
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    trained(tmp_path / "other", strategy, callbacks=[note])
    trained(tmp_path / "board", strategy, update_freq=every)
    steps = range(1, EPOCHS * STEPS + 1) if every == "batch" else range(every, EPOCHS * STEPS + 1, every)
    found = scalars(tmp_path / "board" / "train")
    for name in ("loss", "mae"):
        assert found[f"batch_{name}"] == {step: seen[step - 1][name] for step in steps}
    assert found["epoch_loss"].keys() == set(range(EPOCHS))


@pytest.mark.slow
def test_steps_are_taken_in_groups(tmp_path):
    """It sees the ones that it writes, and few others."""
    seen = []

    class Board(TensorBoard):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            super().on_train_batch_end(batch, logs)

    many = rows(4000, 6), rows(4000, 2, seed=1)
    for callback in (Board(tmp_path / "a"), Board(tmp_path / "b", update_freq=64)):
        seen.clear()
        run(regressor(), fitting(*many, batch_size=10, epochs=2, callbacks=[callback]), on(1))
        assert len(seen) < 300, "steps came one at a time"
    assert {63, 127, 191} <= set(seen)
    assert list(scalars(tmp_path / "b" / "train")["batch_loss"]) == list(range(64, 801, 64))


@pytest.mark.parametrize(
    ("options", "done", "due"),
    [
        ({}, 3, 256),
        ({"update_freq": "batch"}, 3, 1),
        ({"update_freq": 100}, 0, 100),
        ({"update_freq": 100}, 130, 70),
        ({"profile_batch": 1}, 0, 1),
        ({"profile_batch": (10, 20)}, 0, 9),
        ({"profile_batch": (10, 20)}, 9, 11),
        ({"profile_batch": (10, 20)}, 12, 8),
        ({"profile_batch": (10, 20)}, 20, 256),
        ({"profile_batch": (10, 20), "update_freq": 4}, 9, 3),
    ],
)
def test_how_many_steps_may_come_at_once(tmp_path, options, done, due):
    board = TensorBoard(tmp_path, **options)
    board.on_epoch_begin(0)
    assert board.steps_until_due(done) == due


@EVERYWHERE
def test_executions_of_several_steps_are_numbered_as_in_keras(tmp_path, strategy):
    trained(tmp_path, strategy, regressor(steps_per_execution=2), update_freq=1)
    assert list(scalars(tmp_path / "train")["batch_loss"]) == list(range(1, 10))


class Slow(keras.callbacks.Callback):
    """Two seconds a batch, and thirty a validation, by a clock of its own."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def on_train_batch_end(self, batch, logs=None):
        self.now += 2.0

    def on_test_end(self, logs=None):
        self.now += 30.0


@ON_DEVICES
def test_rows_and_steps_a_second(tmp_path, strategy, monkeypatch):
    """Rows over the seconds of the training, steps over those of the whole epoch, as Keras has it."""
    slow = Slow()
    monkeypatch.setattr("unisono._src.tensorboard.batch_count.time", slow)
    trained(tmp_path, strategy, callbacks=[slow], epochs=2, more=VALIDATION, write_steps_per_second=True, update_freq=2)
    found = scalars(tmp_path / "train")
    assert found["epoch_images_per_second"] == dict.fromkeys(range(2), np.float32(ROWS / 10))
    assert found["epoch_steps_per_second"] == dict.fromkeys(range(2), np.float32(5 / 40))
    assert found["batch_steps_per_second"] == dict.fromkeys((2, 4, 6, 8, 10), 0.5)


def test_the_scale_of_the_loss_and_rates_that_change(tmp_path):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4, 9], [0.1, 0.05, 0.025])
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(schedule), initial_scale=8.0, dynamic_growth_steps=5
    )
    for name, strategy in (("plain", None), ("ours", lambda: on(3))):
        trained(tmp_path / name, strategy, regressor(optimizer))
        found = scalars(tmp_path / name / "train")
        assert found["epoch_loss_scale"] == {0: 16.0, 1: 32.0, 2: 64.0}
        assert found["epoch_learning_rate"] == {0: np.float32(0.05), 1: np.float32(0.025), 2: np.float32(0.025)}


def test_a_metric_of_several_values_has_a_tag_for_each(tmp_path):
    def make():
        model = keras.Sequential([layers.Dense(3, "softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        return model

    logs = run(make, fitting(X, np.eye(3)[np.arange(ROWS) % 3], callbacks=[TensorBoard(tmp_path)])).logs
    found = scalars(tmp_path / "train")
    assert [found[f"epoch_f1_score/{index}"][0] for index in range(3)] == np.ravel(logs["f1_score"][0]).tolist()


def test_evaluate_alone(tmp_path):
    """Keras' tags, at the optimizer's step, and no file of a training that there is none of."""
    model = trained(tmp_path / "fit", lambda: on(3)).model
    loss, mae = model.evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[TensorBoard(tmp_path / "alone")])
    assert scalars(tmp_path / "alone" / "validation") == {
        "evaluation_loss_vs_iterations": {15: loss},
        "evaluation_mae_vs_iterations": {15: mae},
    }
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["validation"]


# --- weights ----------------------------------------------------------------------------------------------------------


@ON_DEVICES
def test_histograms_and_images_of_weights(tmp_path, strategy):
    model = trained(tmp_path, strategy, histogram_freq=2, write_images=True).model
    found = tensors(tmp_path / "train")
    paths = ["first/kernel", "first/bias", "second/kernel", "second/bias"]
    of_weights = {(f"{path}/{of}", plugin) for path in paths for of, plugin in (("histogram", "histograms"), ("image", "images"))}
    assert {(tag.split("/", 1)[1] if tag.startswith("sequential") else tag, plugin) for tag, plugin in found} - of_weights == {
        ("keras", "graph_keras_model")
    }
    for weight in model.weights:
        at = found[f"{weight.path}/histogram", "histograms"]
        assert list(at) == [0, 2]
        assert array_in(at[2]).tolist() == weight_summaries.compute_histogram(weight.value).tolist()
        assert list(found[f"{weight.path}/image", "images"][2].string_val) == weight_summaries.encode_images(weight.value)


@pytest.mark.parametrize(
    "data",
    [np.arange(100) ** 2 / 7, [3.0] * 5, [], [1e-30, 2e-30, 2e30], rows(1000), np.array([True, False, True])],
    ids=["squares", "equal", "nothing", "far apart", "normal", "truth"],
)
def test_histograms_are_tensorboard_s_own(data):
    pytest.importorskip("tensorboard", exc_type=ImportError)
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    (value,) = histogram_pb("tag", data).value
    assert weight_summaries.compute_histogram(data).tolist() == array_in(value.tensor).tolist()


def test_histograms_are_of_finite_values():
    assert weight_summaries.compute_histogram([1.0, np.nan, 2.0, np.inf, -np.inf])[:, 2].sum() == 2
    assert not weight_summaries.compute_histogram([np.nan]).any()


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((5,), (1, 5, 1, 1)),
        ((4, 2), (1, 2, 4, 1)),
        ((2, 4), (1, 2, 4, 1)),
        ((3, 3, 1, 6), (6, 3, 3, 1)),
        ((5, 3, 3, 3), (5, 3, 3, 3)),
        ((3, 3, 2, 6), None),
        ((2, 3, 4, 5, 3), None),
        ((1,), None),
    ],
)
def test_what_keras_makes_images_of(shape, seen):
    weight = np.linspace(-1, 2, int(np.prod(shape)), dtype="float32").reshape(shape)
    images = weight_summaries.encode_images(weight)
    if seen is None:
        assert images is None
        return
    count, height, width, channels = seen
    assert images[:2] == [str(width).encode(), str(height).encode()]
    assert len(images) == 2 + min(3, count)
    expected = weight_summaries.stack_images(np.squeeze(weight))
    for image, pixels in zip(images[2:], expected, strict=False):
        assert read_png(image, channels).tolist() == np.clip(np.floor(pixels * 255.5), 0, 255).tolist()


def read_png(data, channels):
    """By hand, as it was written by hand."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    parts, start = {}, 8
    while start < len(data):
        (length,) = struct.unpack_from(">I", data, start)
        kind, content = data[start + 4 : start + 8], data[start + 8 : start + 8 + length]
        assert struct.unpack_from(">I", data, start + 8 + length) == (zlib.crc32(kind + content),)
        parts[kind], start = content, start + 12 + length
    width, height = struct.unpack_from(">II", parts[b"IHDR"])
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), "uint8").reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


# --- the model --------------------------------------------------------------------------------------------------------


def test_the_graph_of_layers(tmp_path):
    model = trained(tmp_path).model
    (config,) = tensors(tmp_path / "train")["keras", "graph_keras_model"][0].string_val
    assert json.loads(config) == json.loads(model.to_json())
    (graph,) = [graph_pb2.GraphDef.FromString(event.graph_def) for event in events(tmp_path / "train") if event.graph_def]
    assert [(node.op, list(node.input)) for node in graph.node] == [
        ("InputLayer", []),
        ("Dense", [graph.node[0].name]),
        ("Dense", ["first"]),
    ]


def test_no_graph(tmp_path):
    trained(tmp_path, write_graph=False, epochs=1)
    assert tensors(tmp_path / "train") == {}
    assert not any(event.graph_def for event in events(tmp_path / "train"))


def test_graphs_of_models_in_models():
    pair = [keras.Input((4,), name="a"), keras.Input((4,), name="b")]
    two = keras.Model(pair, [layers.Add(name="sum")(pair), layers.Multiply(name="product")(pair)], name="two")
    line = keras.Sequential([keras.Input((4,), name="in"), layers.Dense(4, name="d")], name="line")
    x, shared = keras.Input((4,), name="x"), layers.Dense(4, name="shared")
    first, second = two([line(shared(x)), shared(layers.ReLU(name="relu")(line(x)))])
    attention = layers.MultiHeadAttention(1, 2, name="attention")
    out = attention(layers.Reshape((1, 4), name="q")(second), value=layers.Reshape((1, 4), name="v")(first))
    model = keras.Model(x, out, name="whole")
    nodes = {node.name: node for node in build_nodes(json.loads(model.to_json()))}
    assert nodes["shared"].inputs == ("x", "relu")
    assert nodes["two/a"].inputs == ("line/d",)
    assert nodes["two/b"].inputs == ("shared",)
    assert nodes["two/product"] == Node("two/product", "Multiply", ("two/a", "two/b"))
    assert (nodes["q"].inputs, nodes["v"].inputs) == (("two/product",), ("two/sum",))
    assert nodes["attention"].inputs == ("q", "v")
    assert {name for node in nodes.values() for name in node.inputs} <= set(nodes)
    around = {node.name: node for node in build_nodes(json.loads(keras.Sequential([keras.Input((4,)), model]).to_json()))}
    assert around["whole/shared"].inputs == ("whole/x", "whole/relu")
    assert len(around["whole/x"].inputs) == 1
    assert {name for node in around.values() for name in node.inputs} <= set(around)


class WithoutConfig(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2, name="inside")

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    ("model", "named"),
    [(Subclassed, "inside"), (lambda: keras.Sequential([WithoutConfig(lambda x: x), layers.Dense(2)]), "without_config")],
)
def test_models_without_a_graph_have_a_table(tmp_path, model, named):
    def make():
        made = model()
        made.compile("sgd", "mse")
        return made

    trained(tmp_path, make=make, epochs=1)
    ((key, at),) = tensors(tmp_path / "train").items()
    assert key == ("model_summary", "text")
    assert named in at[0].string_val[0].decode()


# --- tables for the projector -----------------------------------------------------------------------------------------


def with_tables():
    pair = [keras.Input((1,), name="word"), keras.Input((1,), name="place")]
    tables = layers.Embedding(7, 3, name="words"), layers.Embedding(5, 2, name="places")
    flat = [layers.Flatten()(table(x)) for table, x in zip(tables, pair, strict=True)]
    model = keras.Model(pair, layers.Dense(2)(layers.Concatenate()(flat)))
    model.compile("sgd", "mse")
    return model


def fit_tables(directory, strategy=None, epochs=3, **options):
    x = [np.arange(ROWS).reshape(-1, 1) % size for size in (7, 5)]
    fit = fitting(x, Y, batch_size=BATCH, epochs=epochs, callbacks=[TensorBoard(directory, **options)])
    return run(with_tables, fit, strategy).model


def test_tables_of_embeddings(tmp_path):
    model = fit_tables(tmp_path, on(3), embeddings_freq=2, embeddings_metadata={"words": "words.tsv"})
    config = (tmp_path / "projector_config.pbtxt").read_text()
    paths = [f"train/embeddings/{name}/epoch_0000{epoch}.tsv" for name in ("places", "words") for epoch in (0, 2)]
    assert [line.split('"')[1] for line in config.splitlines() if "tensor_path" in line] == paths
    assert config.count('metadata_path: "words.tsv"') == 2
    for name in ("words", "places"):
        table = np.loadtxt(tmp_path / f"train/embeddings/{name}/epoch_00002.tsv", dtype="float32", delimiter="\t")
        assert table.tolist() == np.asarray(model.get_layer(name).embeddings.value).tolist()


def test_metadata_of_all_tables_and_of_unknown_ones(tmp_path):
    fit_tables(tmp_path, epochs=1, embeddings_freq=1, embeddings_metadata="rows.tsv")
    assert (tmp_path / "projector_config.pbtxt").read_text().count('metadata_path: "rows.tsv"') == 2
    with pytest.raises(
        ValueError, match=r"received the names \['word'\], and the model's Embedding layers are \['words', 'places'\]"
    ):
        fit_tables(tmp_path, embeddings_freq=1, embeddings_metadata={"word": "rows.tsv"})


def test_a_model_without_tables(tmp_path):
    with pytest.warns(UserWarning, match=r"has no keras.layers.Embedding, so that nothing is written.*Write embeddings_freq=0"):
        trained(tmp_path, epochs=1, embeddings_freq=1)


# --- profiles ---------------------------------------------------------------------------------------------------------


def traced(directory):
    (path,) = (directory / "train" / "plugins" / "profile").glob("*/*.trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    return sorted(name for name in names if name and name.startswith("Profiled batch"))


@ON_DEVICES
@pytest.mark.parametrize(("asked", "batches"), [pytest.param(7, [1], id="one"), *slow(((4, 6), [3, 4, 0]), ("4,6", [3, 4, 0]))])
def test_a_profile(tmp_path, strategy, asked, batches):
    """Named by the numbers in the epoch, as in Keras. Several may come at once, and are named by the first."""
    seen = []

    class One(keras.callbacks.Callback):
        """Has steps come one at a time."""

        def on_train_batch_begin(self, batch, logs=None):
            seen.append(batch)

    trained(tmp_path, strategy, callbacks=[One()], profile_batch=asked)
    assert len(seen) == EPOCHS * STEPS
    assert traced(tmp_path) == sorted(f"Profiled batch {batch}" for batch in batches)


@pytest.mark.slow
def test_a_profile_over_the_end(tmp_path):
    """Is written when fit is over, however that comes."""

    def fail(epoch, logs):
        raise RuntimeError("at the end of the epoch")

    board = TensorBoard(tmp_path / "a", profile_batch=(3, 100))
    failing = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(RuntimeError, match="at the end of the epoch"):
        run(regressor(), fitting(X, Y, batch_size=BATCH, callbacks=[failing, board]), on(3))
    assert traced(tmp_path / "a")
    trained(tmp_path / "b", epochs=1, profile_batch=(3, 100))
    assert traced(tmp_path / "b") == ["Profiled batch 2", "Profiled batch 3", "Profiled batch 4"]


def test_a_profile_is_of_whole_batches(tmp_path, monkeypatch):
    """What was started before them is waited for, and they are."""
    done = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda directory, profiler_options: done.append(f"start in {directory}"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: done.append("stop"))
    profile = Profile((2, 3), str(tmp_path))
    for number in range(1, 6):
        profile.begin_batch(number, number - 1, lambda: done.append("wait"))
        done.append(number)
        profile.end_batch(number, lambda: done.append("wait"))
    assert done == [1, "wait", f"start in {tmp_path}", 2, 3, "wait", "stop", 4, 5]


def test_a_profile_that_nothing_reached(tmp_path):
    with pytest.warns(UserWarning, match=r"profile_batch=16 asks for a profile from batch 16 on, and this fit had 15"):
        trained(tmp_path, lambda: on(3), profile_batch=16)


@pytest.mark.slow
def test_a_profile_beside_another(tmp_path):
    jax.profiler.start_trace(str(tmp_path / "other"))
    try:
        with pytest.warns(
            UserWarning, match=r"profile_batch=2: there is no profile, because RuntimeError was raised: Profile has"
        ):
            logs = trained(tmp_path / "board", profile_batch=2).logs
    finally:
        jax.profiler.stop_trace()
    assert len(logs["loss"]) == EPOCHS
    assert not (tmp_path / "board" / "train" / "plugins").exists()


# --- going on ---------------------------------------------------------------------------------------------------------


class BrokenOffError(Exception):
    pass


class BreakOff(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise BrokenOffError
        self.left -= 1

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def newest(directory):
    """{tag: {step: number}}; what was written again behind a checkpoint must say the same again."""
    found = {}
    for step, value in values(directory):
        if value.HasField("simple_value") and not value.tag.endswith("_per_second"):
            assert found.setdefault(value.tag, {}).setdefault(step, value.simple_value) == value.simple_value
    return {tag: dict(sorted(numbers.items())) for tag, numbers in found.items()}


def fit_with_backup(directory, devices, *others, first="board"):
    board, backup = TensorBoard(directory, update_freq=1), BackupAndRestore(directory / "backup", save_freq=2)
    ours = [board, backup] if first == "board" else [backup, board]
    run(regressor(), fitting(X, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[*others, *ours], **VALIDATION), on(devices))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    fit_with_backup(directory, 3)
    return {of: without_speed(scalars(directory / of)) for of in ("train", "validation")}


@pytest.mark.parametrize("first", ["backup", *slow("board")])
@pytest.mark.parametrize("after", [6, *slow(1, 4, 5, 12)])
def test_a_resumed_training_goes_on_in_its_files(tmp_path, whole, after, first):
    """In whichever order the callbacks stand: all batches and epochs have the numbers and values of an uninterrupted run."""
    with pytest.raises(BrokenOffError):
        fit_with_backup(tmp_path, 3, BreakOff(after), first=first)
    fit_with_backup(tmp_path, 1, first=first)
    assert {of: newest(tmp_path / of) for of in whole} == whole
    assert list(whole["train"]["batch_loss"]) == list(range(1, 16))


def test_an_epoch_that_only_its_validation_is_left_of(tmp_path, whole):
    """Keras' loop is given its last step again, which is not written again."""

    def interrupt(batch, logs):
        if board.get_state()["batches_before_epoch"] == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    def fit(devices, *others):
        backup = BackupAndRestore(tmp_path / "backup", save_freq=False)
        fit = fitting(X, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[*others, board, backup], **VALIDATION)
        run(regressor(), fit, on(devices))

    board = TensorBoard(tmp_path, update_freq=1)
    with pytest.raises(SystemExit):
        fit(3, keras.callbacks.LambdaCallback(on_test_batch_begin=interrupt))
    fit(1)
    assert {of: without_speed(scalars(tmp_path / of)) for of in whole} == whole


def test_the_state_is_json_and_what_it_has_counted_is_on_disk(tmp_path):
    states, written = [], []

    def note(batch, logs):
        states.append(json.loads(json.dumps(board.get_state())))
        written.append(list(scalars(tmp_path / "train")["batch_loss"]))

    board = TensorBoard(tmp_path, update_freq=1)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    run(regressor(), fitting(X, Y, batch_size=BATCH, epochs=2, callbacks=[board, note]))
    assert states[6] == {"epoch": 1, "batches_before_epoch": 5, "batches_of_epoch": 2}
    assert written[6] == [1, 2, 3, 4, 5, 6, 7]


def test_rows_of_a_resumed_epoch(tmp_path):
    """Only those that were trained on here are counted, though the metric knows the others."""
    speed = Speed(0)
    speed.begin_batch(3, 4)
    for batch in (3, 4, 5, 6, 7):
        speed.end_batch(batch)
    model = regressor()()
    model.evaluate(rows(40, 6), rows(40, 2), verbose=0)  # 40 rows in 8 batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono._src.tensorboard.batch_count.time.perf_counter", lambda: speed._began + 5.0)
        speed.note_rows(model)
    assert speed.rows_per_second == 5.0


# --- files ------------------------------------------------------------------------------------------------------------


def open_files(directory):
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the listing's own
            continue
    return [link for link in links if link.startswith(str(directory))]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="tells open files on Linux")
@pytest.mark.parametrize("strategy", [None, lambda: on(3)], ids=["plain", "ours"])
def test_files_are_closed_and_whole_however_fit_ended(tmp_path, strategy):
    assert trained(tmp_path / "a", strategy).logs
    assert open_files(tmp_path) == []
    if strategy is None:
        return
    board = TensorBoard(tmp_path / "b", update_freq=1)
    with pytest.raises(BrokenOffError):
        run(regressor(), fitting(X, Y, batch_size=BATCH, callbacks=[BreakOff(3), board]), strategy())
    assert open_files(tmp_path) == []
    assert list(scalars(tmp_path / "b" / "train")["batch_loss"]) == [1, 2, 3]


def test_a_plain_fit_after_one_that_was_broken_off(tmp_path):
    """Counts from 1 again."""
    board, model = TensorBoard(tmp_path, update_freq=1), regressor()()
    with pytest.raises(BrokenOffError):
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[BreakOff(3), board])
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[board])
    assert [step for step, value in values(tmp_path / "train") if value.tag == "batch_loss"] == [1, 2, 3, 1, 2, 3, 4, 5]
    assert open_files(tmp_path) == []


def test_fits_of_one_second_have_files_of_their_own(tmp_path):
    for _ in range(3):
        trained(tmp_path, epochs=1)
    assert len(list((tmp_path / "train").iterdir())) == 3


# --- arguments --------------------------------------------------------------------------------------------------------


def test_the_arguments_are_those_of_keras():
    ours, theirs = (inspect.signature(of.__init__).parameters for of in (TensorBoard, keras.callbacks.TensorBoard))
    assert [(name, p.default) for name, p in ours.items()] == [(name, p.default) for name, p in theirs.items()]


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ("fit", "TensorFlow"),
        ("evaluate", "TensorFlow"),
        ("predict", "TensorFlow"),
        ("fit", "TensorFlow with the package tensorboard"),
    ],
)
def test_that_of_keras_is_refused_where_what_it_needs_is_missing(tmp_path, monkeypatch, method, missing):
    """TensorFlow brings TensorBoard's package up to 2.20."""
    there = ["tensorflow"] if "with" in missing else ["tensorboard"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    with on(1).scope():
        model = regressor()()
    data = (X,) if method == "predict" else (X, Y)
    said = rf"(?s)by {missing}, which is not installed\. Write un\.callbacks\.TensorBoard, which.*tensorboard\]"
    with pytest.raises(ImportError, match=said):
        getattr(model, method)(*data, callbacks=[keras.callbacks.TensorBoard(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"update_freq": 0}, r"update_freq is 'epoch', 'batch', or a number of batches; received 0\."),
        ({"update_freq": "step"}, "received 'step'"),
        ({"update_freq": True}, "received True"),
        ({"histogram_freq": -1}, r"histogram_freq is a number of epochs, or 0 for never; received -1\."),
        ({"embeddings_freq": "epoch"}, r"embeddings_freq is a number of epochs, or 0 for never; received 'epoch'\."),
        (
            {"profile_batch": -1},
            "profile_batch is the number of a batch, a pair of the first and the last one, or 0.*received -1",
        ),
        ({"profile_batch": (5, 3)}, r"received \(5, 3\)"),
        ({"profile_batch": (0, 3)}, r"received \(0, 3\)"),
        ({"profile_batch": (1, 2, 3)}, r"received \(1, 2, 3\)"),
        ({"profile_batch": ()}, r"received \(\)"),
        ({"profile_batch": "a,b"}, "received 'a,b'"),
        ({"profile_batch": 2.5}, "received 2.5. Batches are counted over all epochs, from 1 on"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, text):
    with pytest.raises(ValueError, match=text):
        TensorBoard(tmp_path, **arguments)


def test_arguments_that_need_another(tmp_path):
    with pytest.warns(UserWarning, match="write_images=True writes images when histograms are written. Write histogram_freq=1"):
        TensorBoard(tmp_path, write_images=True)
    with pytest.warns(UserWarning, match="embeddings_metadata is for the tables that embeddings_freq=1 writes"):
        TensorBoard(tmp_path, embeddings_metadata="words.tsv")


def test_without_tensorboardx(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    for name in [name for name in sys.modules if name.startswith("tensorboardX.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"tensorboardX, which cannot be imported.*pip install \"unisono\[tensorboard\]\""):
        TensorBoard(tmp_path)


def test_importing_tensorboardx_leaves_the_environment(tmp_path, monkeypatch):
    """It sets a variable by itself, which a first import shows."""
    monkeypatch.delenv("CRC32C_SW_MODE", raising=False)
    for name in ("tensorboardX", "tensorboardX.record_writer", "tensorboardX.event_file_writer", "tensorboardX.crc32c"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    TensorBoard(tmp_path)
    assert "tensorboardX.crc32c" in sys.modules
    assert "CRC32C_SW_MODE" not in os.environ


# --- Keras' own -------------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("steps", [1, 2])
def test_keras_writes_the_same_by_tensorflow(tmp_path, steps):
    """Tags, plugins, steps and values, but for what is measured in seconds."""
    pytest.importorskip("tensorflow")
    options = {"histogram_freq": 2, "write_images": True, "write_steps_per_second": True, "update_freq": 1}

    def make():
        model = keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3), layers.Dense(2)], name="net"
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=steps)
        return model

    x = rows(ROWS, 6, 6, 1)
    for name, of in (("keras", keras.callbacks.TensorBoard), ("ours", TensorBoard)):
        keras.utils.clear_session()
        validation = {"validation_data": (x[:13], Y[:13])}
        run(make, fitting(x, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[of(tmp_path / name, **options)], **validation))
    for of in ("train", "validation"):
        theirs, ours = shown(tmp_path / "keras" / of), shown(tmp_path / "ours" / of)
        assert len(theirs) > 5
        assert {tag for tag, _ in set(ours) - set(theirs)} == ({"epoch_images_per_second"} if of == "train" else set())
        assert set(theirs) <= set(ours)
        for key, value in theirs.items():
            assert ours[key] == value or "per_second" in key[0], key


def shown(directory):
    """{(tag, step): what is seen}, of both forms of scalars."""
    found = {}
    for step, value in values(directory):
        data, tensor = value.metadata.plugin_data, value.tensor
        if value.HasField("simple_value"):
            seen = value.simple_value
        elif data.plugin_name == "scalars":
            seen = tensor.float_val[0] if tensor.float_val else np.frombuffer(tensor.tensor_content, "<f4")[0]
        elif data.plugin_name == "histograms":
            seen = array_in(tensor).round(12).tolist()
        elif data.plugin_name == "images":
            seen = [*tensor.string_val[:2], *[pixels_of(file) for file in tensor.string_val[2:]]]
        else:
            seen = [data.plugin_name, data.content, json.loads(tensor.string_val[0])]
        found[value.tag, step] = seen
    return found


def pixels_of(file):
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(file))).tolist()
