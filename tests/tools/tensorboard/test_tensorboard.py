"""TensorBoard: its files hold the numbers that Keras' callback writes by TensorFlow, and its arguments are Keras'."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import os
import sys

import keras
import numpy as np
import pytest
from keras import layers

from event_files import EPOCHS, VALIDATION, X, Y, array_in, regressor, scalars, trained, values
from sizes import BATCH, ROWS, STEPS, slow
from trainings import fitting, on, rows, run
from unisono._src.tools.tensorboard.callback import TensorBoard

EVERYWHERE = pytest.mark.parametrize(
    "strategy", [None, lambda: on(3), *slow(lambda: on(1))], ids=["plain", "three devices", "one device"]
)
ON_DEVICES = pytest.mark.parametrize(
    "strategy", [lambda: on(3), *slow(None, lambda: on(1))], ids=["three devices", "plain", "one device"]
)
"""In `make test` without plain Keras, for what it sees as our fit does."""


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
    monkeypatch.setattr("unisono._src.tools.tensorboard.batch_count.time", slow)
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
