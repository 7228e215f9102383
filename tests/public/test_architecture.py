"""The house stands as its page draws it: lower floors know nothing of upper ones, no rooms in a circle, one room for what is private in Keras."""

from __future__ import annotations

import pathlib

import house

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "architecture.md"


def test_lower_floors_know_nothing_of_upper_ones():
    height = {room: -number for number, rooms in enumerate(house.FLOORS.values()) for room in rooms}
    upward = [
        f"{file} imports {imported}"
        for room, edges in house.imports_of_rooms().items()
        for imported, files in edges.items()
        for file in files
        if height[imported] > height[room]
    ]
    assert not upward


def test_no_rooms_import_in_a_circle():
    edges = house.imports_of_rooms()

    def reached(room: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        for other in edges[room]:
            if other not in seen:
                seen = reached(other, seen | {other})
        return seen

    assert [room for room in list(edges) if room in reached(room)] == []


def test_the_page_draws_the_house():
    """`python tests/house.py` prints the drawing."""
    assert house.drawing() in PAGE.read_text()


def test_only_one_room_touches_what_is_private_in_keras():
    touching = [
        str(path.relative_to(house.ROOT))
        for path in house.ROOT.rglob("*.py")
        if "keras_private" not in path.parts and ("keras.src" in path.read_text() or "from keras." in path.read_text())
    ]
    assert not touching
