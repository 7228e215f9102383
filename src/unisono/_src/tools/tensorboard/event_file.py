"""Event files in TensorFlow's format, written with tensorboardX."""

from __future__ import annotations

import importlib
import os
import time
from types import SimpleNamespace

import numpy as np

from unisono._src.tools.tensorboard.layer_graph import Node

SETTING = "CRC32C_SW_MODE"


class EventFiles:
    """The files below `log_dir`, each in its run's directory. A file is made when something is first written to it."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._files: dict[str, EventFile] = {}
        self._flushed = time.monotonic()

    def __getitem__(self, run: str) -> EventFile:
        if run not in self._files:
            self._files[run] = EventFile(os.path.join(self._log_dir, run))
        return self._files[run]

    def flush(self, age: float = 0.0) -> None:
        """Write all events to disk. Nothing is done if the last time was less than `age` seconds ago."""
        now = time.monotonic()
        if now - self._flushed >= age:
            self._flushed = now
            for file in self._files.values():
                file.writer.flush()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].writer.close()


class EventFile:
    """A file that TensorBoard reads while it grows. Fields of its protocol buffers are written as dicts."""

    def __init__(self, directory: str) -> None:
        self._tensorboardx = import_tensorboardx()
        self._tensorboardx.directory_check(directory)
        # tensorboardX counts seconds, and would overwrite the file of a fit that ended in the same second.
        self.writer = self._tensorboardx.EventsWriter(os.path.join(directory, "events"), f".{os.getpid()}.{time.time_ns()}.v2")

    def write_scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers by their tags."""
        self._write_event(step=step, summary={"value": [{"tag": tag, "simple_value": value} for tag, value in values.items()]})

    def write_tensor(
        self, tag: str, plugin: str, value: np.ndarray | bytes | list[bytes], step: int, content: bytes = b""
    ) -> None:
        """Write an array as float64, or texts, for a TensorBoard plugin. `content` is more data for the plugin."""
        if isinstance(value, np.ndarray):
            shape = value.shape
            data = {"dtype": "DT_DOUBLE", "tensor_content": value.astype("<f8").tobytes()}
        else:
            shape = (len(value),) if isinstance(value, list) else ()
            data = {"dtype": "DT_STRING", "string_val": value if isinstance(value, list) else [value]}
        tensor = {**data, "tensor_shape": {"dim": [{"size": size} for size in shape]}}
        metadata = {"plugin_data": {"plugin_name": plugin, "content": content}}
        self._write_event(step=step, summary={"value": [{"tag": tag, "metadata": metadata, "tensor": tensor}]})

    def write_layers(self, nodes: list[Node]) -> None:
        """Write the graph of the run. TensorBoard shows one graph for each run."""
        graph = self._tensorboardx.GraphDef(node=[{"name": node.name, "op": node.kind, "input": node.inputs} for node in nodes])
        self._write_event(graph_def=graph.SerializeToString())

    def _write_event(self, **fields: object) -> None:
        self.writer.write_event(self._tensorboardx.Event(wall_time=time.time(), **fields))


def import_tensorboardx() -> SimpleNamespace:
    """Import the parts of tensorboardX that are used. tensorboardX is an optional dependency."""
    before = os.environ.get(SETTING)
    try:
        names = ("event_file_writer", "record_writer", "proto.event_pb2", "proto.graph_pb2")
        writer, records, events, graphs = (importlib.import_module(f"tensorboardX.{name}") for name in names)
    except ImportError as e:
        raise ImportError(
            f"unisono's TensorBoard writes its files by tensorboardX, which cannot be imported ({e}). Write: "
            f'pip install "unisono[tensorboard]"'
        ) from e
    finally:
        if before is None:  # importing tensorboardX sets it, for every program that this process starts
            os.environ.pop(SETTING, None)
    parts = {"Event": events.Event, "GraphDef": graphs.GraphDef}
    return SimpleNamespace(EventsWriter=writer.EventsWriter, directory_check=records.directory_check, **parts)
