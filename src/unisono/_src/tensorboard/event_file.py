"""Event files in TensorFlow's format, written with tensorboardX."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from unisono._src.tensorboard.layer_graph import Node

SETTING = "CRC32C_SW_MODE"
USED = {
    "event_file_writer": ("EventsWriter",),
    "record_writer": ("directory_check",),
    "proto.event_pb2": ("Event",),
    "proto.graph_pb2": ("GraphDef",),
    "proto.node_def_pb2": ("NodeDef",),
    "proto.summary_pb2": ("Summary", "SummaryMetadata"),
    "proto.tensor_pb2": ("TensorProto",),
    "proto.tensor_shape_pb2": ("TensorShapeProto",),
}


class EventFiles:
    """The files below `log_dir`, each in the directory of its run. A file is made when something is first written to it."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._files: dict[str, EventFile] = {}

    def __getitem__(self, run: str) -> EventFile:
        if run not in self._files:
            self._files[run] = EventFile(os.path.join(self._log_dir, run))
        return self._files[run]

    def flush(self, age: float = 0.0) -> None:
        """Write to disk the events that have waited for `age` seconds."""
        for file in self._files.values():
            file.flush(age)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


class EventFile:
    """A file that TensorBoard reads while it grows."""

    def __init__(self, directory: str) -> None:
        self._tensorboardx = import_tensorboardx()
        self._tensorboardx.directory_check(directory)
        # tensorboardX counts seconds, and would overwrite the file of a fit that ended in the same second.
        self._writer = self._tensorboardx.EventsWriter(os.path.join(directory, "events"), f".{os.getpid()}.{time.time_ns()}.v2")
        self._flushed = time.monotonic()

    def write_scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers by their tags."""
        self._write([self._tensorboardx.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()], step)

    def tensor(self, tag: str, plugin: str, value: np.ndarray | bytes | list[bytes], step: int, content: bytes = b"") -> None:
        """Write a value for a plugin of TensorBoard.

        Args:
            tag: The name that is shown.
            plugin: The plugin's name.
            value: An array of float64, bytes, or a list of bytes.
            step: The step or epoch at which it is shown.
            content: More data for the plugin.
        """
        data = self._tensorboardx.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        metadata = self._tensorboardx.SummaryMetadata(plugin_data=data)
        self._write([self._tensorboardx.Summary.Value(tag=tag, metadata=metadata, tensor=self._make_tensor(value))], step)

    def write_layers(self, nodes: list[Node]) -> None:
        """Write the graph of the run. TensorBoard shows one graph for each run."""
        node_defs = [self._tensorboardx.NodeDef(name=node.name, op=node.kind, input=node.inputs) for node in nodes]
        graph = self._tensorboardx.GraphDef(node=node_defs)
        self._writer.write_event(self._tensorboardx.Event(wall_time=time.time(), graph_def=graph.SerializeToString()))

    def flush(self, age: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._flushed >= age:
            self._writer.flush()
            self._flushed = now

    def close(self) -> None:
        self._writer.close()

    def _write(self, values: Sequence[object], step: int) -> None:
        summary = self._tensorboardx.Summary(value=values)
        self._writer.write_event(self._tensorboardx.Event(wall_time=time.time(), step=step, summary=summary))

    def _make_tensor(self, value: np.ndarray | bytes | list[bytes]) -> object:
        if isinstance(value, np.ndarray):
            return self._tensorboardx.TensorProto(
                dtype="DT_DOUBLE", tensor_shape=self._make_shape(*value.shape), tensor_content=value.astype("<f8").tobytes()
            )
        is_list = isinstance(value, list)
        shape = self._make_shape(len(value)) if is_list else self._make_shape()
        return self._tensorboardx.TensorProto(dtype="DT_STRING", tensor_shape=shape, string_val=value if is_list else [value])

    def _make_shape(self, *sizes: int) -> object:
        shape_proto = self._tensorboardx.TensorShapeProto
        return shape_proto(dim=[shape_proto.Dim(size=size) for size in sizes])


def import_tensorboardx() -> SimpleNamespace:
    """Return the parts of tensorboardX that are used. tensorboardX is an optional dependency."""
    before = os.environ.get(SETTING)
    parts: dict[str, object] = {}
    try:
        for module_name, names in USED.items():
            module = importlib.import_module(f"tensorboardX.{module_name}")
            parts |= {name: getattr(module, name) for name in names}
    except ImportError as e:
        raise ImportError(
            f"unisono's TensorBoard writes its files by tensorboardX, which cannot be imported ({e}). Install it with: pip install "
            f"unisono[tensorboard]"
        ) from e
    finally:
        if before is None:  # importing tensorboardX sets it, for every program that this process starts
            os.environ.pop(SETTING, None)
    return SimpleNamespace(**parts)
