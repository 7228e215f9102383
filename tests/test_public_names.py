"""What is public is documented, and the examples in the documentation run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil

import pytest

import unisono as un

SOURCE = pathlib.Path(un.__file__).parent
PUBLIC = [name for name in un.__all__ if name != "callbacks"]
MODULES = [m.name for m in pkgutil.walk_packages([str(SOURCE)], "unisono.") if "__main__" not in m.name]

FLOORS = [
    {"placement", "xla", "keras_seam", "version", "cluster"},
    {"replica", "tree", "flat", "exchange", "data", "fingerprints", "owned"},
    {"step", "checkpoint"},
    {"strategy", "training", "course", "loop", "pace", "refusals", "errors"},
    {"callbacks", "exporting", "cli"},
]
"""The house: lower floors know nothing of upper ones."""


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    assert inspect.getdoc(getattr(un, name))


def test_the_public_names_are_these():
    """Adding one is a decision."""
    assert sorted(PUBLIC) == [
        "Checkpoint", "MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy", "ReduceOp",
        "Strategy", "TPUStrategy", "compute_average_loss", "export", "fingerprint", "function", "get_replica_context", "get_strategy",
        "in_cross_replica_context", "latest_checkpoint", "load_exported", "replicate", "scale_regularization_loss", "value_and_grad",
    ]  # fmt: skip


def test_type_checkers_see_the_public_names_where_they_come_from():
    """They read imports that are never run."""
    seen = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            seen |= {alias.asname: node.module for alias in node.names if alias.asname and not alias.asname.startswith("_")}
    assert seen.pop("callbacks") == "unisono"
    assert seen == {name: f"unisono.{module}" for name, module in un._MODULES.items()}
    assert set(un.__all__) == {"callbacks", *seen}


@pytest.mark.parametrize("name", un.callbacks.__all__)
def test_every_callback_is_documented(name):
    assert inspect.getdoc(getattr(un.callbacks, name))


def test_the_examples_in_the_documentation_run():
    """Of all modules in one test: most of them have none."""
    found = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert sum(of.attempted for of in found.values()) > 10
    assert [name for name, of in found.items() if of.failed] == []


def test_lower_floors_know_nothing_of_upper_ones():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for imported in imports_of(path):
            if floor_of[imported] > floor_of[room]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {imported}")
    assert not wrong


def imports_of(path: pathlib.Path) -> set[str]:
    """The rooms of the house that a file imports from."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "unisono":
            names = [f"unisono.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("unisono.")}
    return rooms


def test_only_the_seam_touches_what_is_private_in_keras():
    touching = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "keras_seam" not in path.parts and ("keras.src" in path.read_text() or "from keras." in path.read_text())
    ]
    assert not touching
