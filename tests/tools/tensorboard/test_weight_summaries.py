"""What TensorBoard is shown of a model: its weights, its graph of layers, its tables of embeddings."""

from __future__ import annotations

import json
import struct
import zlib

import keras
import numpy as np
import pytest
from keras import layers

from event_files import Y, array_in, events, graph_pb2, tensors, trained
from sizes import BATCH, ROWS, slow
from trainings import fitting, on, rows, run
from unisono._src.tools.tensorboard import weight_summaries
from unisono._src.tools.tensorboard.callback import TensorBoard
from unisono._src.tools.tensorboard.layer_graph import Node, build_nodes

ON_DEVICES = pytest.mark.parametrize(
    "strategy", [lambda: on(3), *slow(None, lambda: on(1))], ids=["three devices", "plain", "one device"]
)
"""In `make test` without plain Keras, for what it sees as our fit does."""


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
