"""The house stands as its page draws it: no imports from upper packages, no rooms in a circle, one place for what is private in a library."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import house

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.mark.parametrize("package", house.PACKAGES)
def test_packages_import_from_those_below(package):
    allowed = house.PACKAGES[package].packages | {package}
    upward = [
        f"{file} imports {imported}"
        for room, edges in house.imports_of_rooms().items()
        for imported, files in edges.items()
        for file in files
        if room.split(".")[0] == package and imported.split(".")[0] not in allowed
    ]
    assert not upward
    assert {room for room in house.imports_of_rooms() if room.split(".")[0] == package} <= set(house.PACKAGES[package].rooms)


@pytest.mark.parametrize("package", house.PACKAGES)
def test_the_engine_and_what_is_below_know_no_keras(package):
    never = {file: found - house.PACKAGES[package].libraries for file, found in house.libraries_of(package).items()}
    assert {file for file, found in never.items() if found} == (
        {"versions.py"} if package == "ground" else set()
    )  # it tells Keras' version


def test_no_rooms_import_in_a_circle():
    edges = house.imports_of_rooms()

    def reached(room: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        for other in edges[room]:
            if other not in seen:
                seen = reached(other, seen | {other})
        return seen

    assert [room for room in list(edges) if room in reached(room)] == []


def test_the_page_draws_the_house():
    """`python tests/helpers/house.py` prints the drawing."""
    assert house.drawing() in PAGE.read_text()


@pytest.mark.parametrize(
    ("place", "private"),
    [
        ("keras/private", r"keras\.src|from keras\."),
        ("programs/private", r"jax\._src|jax\.interpreters|import jaxlib(?!\.version)|from jaxlib"),
        ("keras/checkpoint/orbax_files.py", r"import orbax\.|from orbax"),
        ("keras/checkpoint/remote_storage.py", r"import fsspec|from fsspec"),
    ],
)
def test_one_place_touches_what_is_private_in_a_library(place, private):
    touching = {str(path.relative_to(house.ROOT)) for path in house.ROOT.rglob("*.py") if re.search(private, path.read_text())}
    touching = {path for path in touching if not path.endswith("/__init__.py")}
    assert touching
    assert {path for path in touching if not path.startswith(place)} == set()


def test_one_file_of_the_checkpoints_touches_the_disk():
    """And one asks what fsspec opens. Another storage can take the place of either."""
    call = r"import shutil|(?<!archive\.)\bopen\(|\.(exists|is_dir|is_file|iterdir|glob|stat|mkdir|rename|unlink|touch|(read|write)_(text|bytes))\("
    room = [path for path in (house.ROOT / "keras" / "checkpoint").glob("*.py") if not path.name.endswith("_storage.py")]
    assert [(path.name, match[0]) for path in room for match in re.finditer(call, path.read_text())] == []


def find_unexplained_handlers(path: pathlib.Path) -> list[str]:
    """Return the lines that catch any exception, raise none, and have no comment that says why."""
    text = path.read_text()
    lines = text.splitlines()
    places: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "Exception" in ast.unparse(node.type).split(".")):
            if not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                places.append((node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.With) and any("suppress(Exception)" in ast.unparse(item) for item in node.items):
            places.append((node.lineno - 1, node.lineno))
    return [f"{path.relative_to(house.ROOT)}:{last}" for first, last in places if "#" not in "".join(lines[first - 1 : last])]


def test_who_catches_any_exception_says_why():
    assert [place for path in house.ROOT.rglob("*.py") for place in find_unexplained_handlers(path)] == []
