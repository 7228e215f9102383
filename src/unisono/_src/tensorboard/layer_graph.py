"""The graph of a model's layers, as TensorBoard draws graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MODELS = ("Functional", "Sequential")
"""What has a graph of layers; classes of a user's own may do anything in `call`."""


class Node(NamedTuple):
    """A layer, and the layers that it gets its inputs from."""

    name: str
    kind: str
    inputs: tuple[str, ...]


def nodes_of(model: dict[str, Any]) -> list[Node]:
    """Of what `model.to_json()` says. Of a model inside another one the layers are drawn, in a box of its name."""
    nodes: list[Node] = []
    add(model["config"], "", (), nodes)
    return nodes


def add(model: dict[str, Any], path: str, given: Sequence[str], nodes: list[Node]) -> list[str]:
    """Adds a model's layers to `nodes`, and returns the names of those that make its outputs, as `given` are those of its inputs."""
    entries = dict(zip((name for name, _ in places(model.get("input_layers"))), given, strict=False))
    made: dict[str, list[str]] = {}
    last = list(given)
    for layer in model["layers"]:
        config = layer["config"]
        name = config["name"]
        if "input_layers" not in model:  # a Sequential
            inputs = last
        elif name in entries:
            inputs = [entries[name]]
        else:
            # A layer that is called twice may come before what it is called with.
            inputs = [output(made.get(of, [path + of]), index) for of, index in tensors(layer["inbound_nodes"])]
        if layer["class_name"] in MODELS:
            last = add(config, f"{path}{name}/", inputs, nodes)
        else:
            last = [path + name]
            nodes.append(Node(path + name, layer["class_name"], tuple(inputs)))
        made[name] = last
    return [output(made[name], index) for name, index in places(model.get("output_layers"))] or last


def output(names: list[str], index: int) -> str:
    """A layer of several outputs is one node, and a model inside another has one for each."""
    return names[min(index, len(names) - 1)]


def tensors(value: Any) -> Iterator[tuple[str, int]]:
    """(layer, output) for all that a layer is called with, wherever it stands among the arguments."""
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        name, _, index = value["config"]["keras_history"]
        yield name, index
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def places(value: Any) -> Iterator[tuple[str, int]]:
    """(layer, output) for a model's inputs or outputs, in whatever structure."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        yield value[0], value[2]
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from places(item)
