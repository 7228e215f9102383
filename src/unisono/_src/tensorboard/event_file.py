"""Files of events, in the form in which TensorFlow writes them, by tensorboardX."""

from __future__ import annotations

import importlib
import os
import time
from types import SimpleNamespace
from typing import Any

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
    """The files below `log_dir`, each in the directory of its run. One is made when something is first written to it."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._files: dict[str, EventFile] = {}

    def __getitem__(self, run: str) -> EventFile:
        if run not in self._files:
            self._files[run] = EventFile(os.path.join(self._log_dir, run))
        return self._files[run]

    def flush(self, age: float = 0.0) -> None:
        """Brings to disk what has waited for so many seconds."""
        for file in self._files.values():
            file.flush(age)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


class EventFile:
    """One file, which TensorBoard reads while it grows."""

    def __init__(self, directory: str) -> None:
        self._of = tensorboardx()
        self._of.directory_check(directory)
        # tensorboardX counts seconds, and would overwrite the file of a fit that ended in this one.
        self._writer = self._of.EventsWriter(os.path.join(directory, "events"), f".{os.getpid()}.{time.time_ns()}.v2")
        self._flushed = time.monotonic()

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Numbers by their tags."""
        self._add([self._of.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()], step)

    def tensor(self, tag: str, plugin: str, value: Any, step: int, content: bytes = b"") -> None:
        """What a plugin of TensorBoard shows.

        Args:
            tag: The name that is shown.
            plugin: The plugin's name.
            value: An array of float64, bytes, or a list of bytes.
            step: Where it stands.
            content: What the plugin wants to know beside it.
        """
        data = self._of.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        metadata = self._of.SummaryMetadata(plugin_data=data)
        self._add([self._of.Summary.Value(tag=tag, metadata=metadata, tensor=self._proto(value))], step)

    def graph(self, nodes: list[Node]) -> None:
        """The run's graph, of which TensorBoard shows one."""
        graph = self._of.GraphDef(node=[self._of.NodeDef(name=node.name, op=node.kind, input=node.inputs) for node in nodes])
        self._writer.write_event(self._of.Event(wall_time=time.time(), graph_def=graph.SerializeToString()))

    def flush(self, age: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._flushed >= age:
            self._writer.flush()
            self._flushed = now

    def close(self) -> None:
        self._writer.close()

    def _add(self, values: list[Any], step: int) -> None:
        summary = self._of.Summary(value=values)
        self._writer.write_event(self._of.Event(wall_time=time.time(), step=step, summary=summary))

    def _proto(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._of.TensorProto(
                dtype="DT_DOUBLE", tensor_shape=self._shape(*value.shape), tensor_content=value.astype("<f8").tobytes()
            )
        several = isinstance(value, list)
        shape = self._shape(len(value)) if several else self._shape()
        return self._of.TensorProto(dtype="DT_STRING", tensor_shape=shape, string_val=value if several else [value])

    def _shape(self, *sizes: int) -> Any:
        return self._of.TensorShapeProto(dim=[self._of.TensorShapeProto.Dim(size=size) for size in sizes])


def tensorboardx() -> Any:
    """What is used of tensorboardX, which is an extra."""
    before, found = os.environ.get(SETTING), {}
    try:
        for module, names in USED.items():
            of = importlib.import_module(f"tensorboardX.{module}")
            found |= {name: getattr(of, name) for name in names}
    except ImportError as e:
        raise ImportError(
            f"unisono's TensorBoard writes its files by tensorboardX, which cannot be imported ({e}). Install it with: pip install "
            f"unisono[tensorboard]"
        ) from e
    finally:
        if before is None:  # importing tensorboardX sets it, for every program that is started from here
            os.environ.pop(SETTING, None)
    return SimpleNamespace(**found)
