"""Assign memory to what the step of a loop makes.

It lies in the loop's results, or in buffers that values use one after another.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from unisono._src.kernels.loops.row_steps import MadeInstruction, Value
from unisono._src.kernels.native.row_loops import NOTHING, Address, Instruction, Matrix


class Part(NamedTuple):
    """A part of a value that the step makes."""

    number: int
    offset: int = 0


class PlacedStep(NamedTuple):
    """Instructions with all their addresses, and the widths of the buffers."""

    instructions: list[Instruction]
    kept_widths: list[int]
    local_widths: list[int]


class Layout:
    """The values made in place: where the step would copy them to."""

    def __init__(self, instructions: Sequence[MadeInstruction], widths: Sequence[int]) -> None:
        """Drop each copy of a whole value, where possible. `instructions` are the ones that stay."""
        self.outside: dict[int, Address] = {}
        self._inside: dict[int, Part] = {}
        self.instructions = [step for step in drop_unread_instructions(instructions) if not self._make_in_place(step, widths)]

    def _make_in_place(self, step: MadeInstruction, widths: Sequence[int]) -> bool:
        (value, *_) = step.operands
        if step.operation != "copy" or not isinstance(value, Value) or not isinstance(value.source, int):
            return False
        number = value.source
        is_whole = value.offset == 0 and value.width == step.width == widths[number]
        if not is_whole or number in self.outside or number in self._inside:
            return False
        if isinstance(step.to, Address):
            self.outside[number] = step.to
        else:
            self._inside[number] = Part(step.to, step.offset)
        return True

    def find_whole(self, part: Part) -> Part:
        """Find the part within the value that has its own place."""
        while part.number in self._inside:
            number, offset = self._inside[part.number]
            part = Part(number, offset + part.offset)
        return part


def place_step(instructions: Sequence[MadeInstruction], widths: Sequence[int]) -> PlacedStep:
    """Assign addresses to all instructions. `widths` are those of the values that the step makes."""
    layout = Layout(instructions, widths)
    memory = Memory()
    for number, use in sorted(find_uses(layout).items(), key=lambda item: item[1].first):
        if number not in layout.outside:
            memory.assign(number, use, widths[number])
    places = memory.places | layout.outside

    def find(part: Part) -> Address:
        whole = layout.find_whole(part)
        place = places[whole.number]
        return place._replace(offset=place.offset + whole.offset)

    return PlacedStep([place_instruction(step, find) for step in layout.instructions], memory.kept_widths, memory.local_widths)


def drop_unread_instructions(instructions: Sequence[MadeInstruction]) -> list[MadeInstruction]:
    """Drop the instructions whose results no output depends on."""
    needed: set[int] = set()
    kept: list[MadeInstruction] = []
    for step in reversed(instructions):
        if isinstance(step.to, Address) or step.to in needed:
            kept.append(step)
            needed.update(part.number for part in list_read(step))
    return kept[::-1]


def list_read(step: MadeInstruction) -> Iterator[Part]:
    """Yield the parts of the step's own values that an instruction reads."""
    for operand in step.operands:
        if isinstance(operand, Value) and isinstance(operand.source, int):
            yield Part(operand.source, operand.offset)


class Use(NamedTuple):
    """The instructions between which a value is needed. It is local if no matmul is among them."""

    first: int
    last: int
    is_local: bool


def find_uses(layout: Layout) -> dict[int, Use]:
    """Find the uses of each value that has its own place."""
    touched: dict[int, list[int]] = collections.defaultdict(list)
    for index, step in enumerate(layout.instructions):
        parts = [*list_read(step), *([] if isinstance(step.to, Address) else [Part(step.to)])]
        for part in parts:
            touched[layout.find_whole(part).number].append(index)
    products = [index for index, step in enumerate(layout.instructions) if step.operation == "product"]
    return {
        number: Use(indices[0], indices[-1], not any(indices[0] <= product <= indices[-1] for product in products))
        for number, indices in touched.items()
    }


class Memory:
    """Buffers for the step's values. Values of one width use a buffer one after another."""

    def __init__(self) -> None:
        self.places: dict[int, Address] = {}
        self.kept_widths: list[int] = []
        self.local_widths: list[int] = []
        self._busy: dict[Address, int] = {}
        """The last instruction that needs the value there."""

    def assign(self, number: int, use: Use, width: int) -> None:
        """Choose the buffer of a value. The uses come in the order of their first instructions."""
        kind, widths = ("local", self.local_widths) if use.is_local else ("kept", self.kept_widths)
        free = [
            place
            for place, last in self._busy.items()
            if place.kind == kind and widths[place.number] == width and last < use.first
        ]
        if not free:
            widths.append(width)
        self.places[number] = place = free[0] if free else Address(kind, len(widths) - 1)
        self._busy[place] = use.last


def place_instruction(step: MadeInstruction, find: Callable[[Part], Address]) -> Instruction:
    """Give an instruction its addresses. `find` gives that of a part of a value."""

    def read(operand: Value | Matrix) -> Address | Matrix:
        if isinstance(operand, Matrix):
            return operand
        source = operand.source
        place = find(Part(source, operand.offset)) if isinstance(source, int) else source._replace(offset=operand.offset)
        is_repeated = operand.width == 1 and step.width != 1 and step.operation != "product"
        return place._replace(is_number=place.is_number or is_repeated)

    to = step.to if isinstance(step.to, Address) else find(Part(step.to, step.offset))
    a, b, c = [*map(read, step.operands), NOTHING, NOTHING][:3]
    assert isinstance(a, Address)
    assert isinstance(c, Address)
    return Instruction(step.operation, step.width, to, a, b, c)
