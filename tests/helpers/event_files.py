"""A training that TensorBoard follows, and what is found in its files."""

from __future__ import annotations

import pathlib
import struct

import keras
import numpy as np
import pytest
from keras import layers

from sizes import BATCH, ROWS
from trainings import fitting, rows, run
from unisono._src.tools.tensorboard.callback import TensorBoard

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
graph_pb2 = pytest.importorskip("tensorboardX.proto.graph_pb2")
record_writer = pytest.importorskip("tensorboardX.record_writer")

X, Y = rows(ROWS, 6), rows(ROWS, 2, seed=1)
VALIDATION = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": 4}
EPOCHS = 3


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
