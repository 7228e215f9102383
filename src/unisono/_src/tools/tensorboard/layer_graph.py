"""A model's layers for TensorBoard: as a graph or a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import keras

from unisono._src.typing import Config, Json

if TYPE_CHECKING:
    from unisono._src.tools.tensorboard.event_file import EventFile

MODELS = ("Functional", "Sequential")
"""Classes of models with a graph of layers. A user's class may do anything in `call`."""


class Node(NamedTuple):
    """A layer, and the layers of its inputs."""

    name: str
    kind: str
    inputs: tuple[str, ...]


def write_model(model: keras.Model, file: EventFile) -> None:
    """Write the graph of layers, or a table of them.

    The graph is also written in the form and under the tag of Keras ("conceptual graph"). Without a graph, a table of layers is written as
    text.
    """
    if type(model).__name__ in MODELS:
        try:
            config = model.to_json()
            nodes = build_nodes(json.loads(config))
        except Exception:  # a layer of the user has no config, or an unusual one: no reason to lose a training
            pass
        else:
            file.write_tensor("keras", "graph_keras_model", config.encode(), 0, content=b"1")
            file.write_layers(nodes)
            return
    lines: list[str] = []
    model.summary(print_fn=lines.append)
    table = "\n".join(lines)
    file.write_tensor("model_summary", "text", f"```\n{table}\n```".encode(), 0)


def build_nodes(model: Config) -> list[Node]:
    """Build the graph's nodes from `model.to_json()`. The layers of an inner model are drawn in a box with the model's name."""
    nodes: list[Node] = []
    add_layers(model["config"], "", (), nodes)
    return nodes


def add_layers(model: Config, path: str, inputs_given: Sequence[str], nodes: list[Node]) -> list[str]:
    """Add a model's layers to `nodes`.

    `inputs_given` names the layers that make the model's inputs. The result names those that make its outputs.
    """
    entries = dict(zip((name for name, _ in find_model_ends(model.get("input_layers"))), inputs_given, strict=False))
    made: dict[str, list[str]] = {}
    last = list(inputs_given)
    for layer in model["layers"]:
        config = layer["config"]
        name = config["name"]
        if "input_layers" not in model:  # a Sequential
            inputs = last
        elif name in entries:
            inputs = [entries[name]]
        else:
            # A layer that is called twice may come before what it is called with.
            inputs = [
                pick_output(made.get(source, [path + source]), index)
                for source, index in find_call_inputs(layer["inbound_nodes"])
            ]
        if layer["class_name"] in MODELS:
            last = add_layers(config, f"{path}{name}/", inputs, nodes)
        else:
            last = [path + name]
            nodes.append(Node(path + name, layer["class_name"], tuple(inputs)))
        made[name] = last
    return [pick_output(made[name], index) for name, index in find_model_ends(model.get("output_layers"))] or last


def pick_output(names: list[str], index: int) -> str:
    """Find the node of an output. A layer with several outputs is one node; an inner model has a node for each output."""
    return names[min(index, len(names) - 1)]


def find_call_inputs(call: Json) -> Iterator[tuple[str, int]]:
    """Yield (layer, output) for each tensor in a layer's call arguments. They may be nested."""
    for value in walk_json(call):
        if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
            name, _, index = value["config"]["keras_history"]
            yield name, index


def find_model_ends(ends: Json) -> Iterator[tuple[str, int]]:
    """Yield (layer, output) for each input or output of a model. They may be nested."""
    for value in walk_json(ends):
        if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
            yield value[0], value[2]


def walk_json(value: Json) -> Iterator[Json]:
    """Yield a value and all values inside it."""
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk_json(item)
