"""The report of the memory of a training, as a table and in JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from unisono._src.typing import Json

T = TypeVar("T")

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The bytes that a training needs on one device."""

    weights: int
    """The model's variables, trained or not."""
    optimizer: int
    """The optimizer's variables."""
    gradients: int
    """Sums of the replicas' gradients. With one replica there are none."""
    gathered: int
    """Rows of all replicas, for code that looks at the whole batch."""
    kept: int
    """Values of all replicas that a later phase of the step reads."""
    activations: int
    """What the program of the step asks for while it runs: activations of one replica, its gradient, and other values in between."""
    batch: int
    """The rows of a call of the program, what it returns, and the metrics."""
    ahead: int
    """The rows of the next call, which are sent while the program runs."""

    @property
    def total(self) -> int:
        """The most that there is at a time, in a step."""
        return self.held + self.activations + self.ahead

    @property
    def held(self) -> int:
        """What there is between two steps."""
        return self.weights + self.optimizer + self.gradients + self.gathered + self.kept + self.batch

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in (*COLUMNS, "held", "total")}


COLUMNS = ("weights", "optimizer", "gradients", "gathered", "kept", "activations", "batch", "ahead")
"""The columns of the table, in order: they add up to the total."""

SELDOM = ("gathered", "kept")
"""Columns that are left out where they have nothing."""


@dataclasses.dataclass(frozen=True)
class MemoryChoice:
    """The memory of a training for one R."""

    replicas: int
    """R."""
    is_own: bool
    """Whether it is the R of the strategy."""
    rows: int
    """The rows of the largest replica."""
    devices: Mapping[str, DeviceMemory]
    """By the name of the device."""
    layers: Mapping[str, int]
    """The bytes of gathered rows by the layer that reads them, where one does."""

    def to_dict(self) -> Json:
        return {
            "replicas": self.replicas,
            "is_own": self.is_own,
            "rows": self.rows,
            "devices": {name: memory.to_dict() for name, memory in self.devices.items()},
            "layers": dict(self.layers),
        }


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """The memory of a training, by R and device. It prints as a table."""

    model: str
    """The name of the model."""
    batch_size: int
    """The rows of a global batch."""
    choices: Sequence[MemoryChoice]
    """By R, in ascending order."""
    limits: Mapping[str, int]
    """The bytes that JAX has on a device, where it tells."""

    @property
    def own(self) -> MemoryChoice:
        """The choice with the R of the strategy."""
        for choice in self.choices:
            if choice.is_own:
                return choice
        listed = [choice.replicas for choice in self.choices]
        raise ValueError(
            f"The report has no row of the strategy's own R; it has {listed}. Write replicas=[..., R] for strategy.memory, or leave it out."
        )

    def to_dict(self) -> Json:
        """Build what JSON holds. All numbers are bytes."""
        choices = [choice.to_dict() for choice in self.choices]
        return {"model": self.model, "batch_size": self.batch_size, "choices": choices, "limits": dict(self.limits)}

    def to_json(self) -> str:
        """Write the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(format_report(self))

    __repr__ = __str__


def format_report(report: MemoryReport) -> Iterator[str]:
    """Yield the lines of the table."""
    memories = [memory for choice in report.choices for memory in choice.devices.values()]
    columns = [name for name in COLUMNS if name not in SELDOM or any(getattr(memory, name) for memory in memories)]
    table = [["R", "rows", "device", *columns, "total", *(["fits"] if report.limits else [])]]
    for choice in report.choices:
        for names, memory in group_devices(choice.devices):
            first = [f"{'* ' * choice.is_own}{choice.replicas}", str(choice.rows), names]
            sizes = [format_size(size) for size in (*(getattr(memory, name) for name in columns), memory.total)]
            limits = [report.limits[name] for name in choice.devices if name in report.limits]
            fits = [("yes" if memory.total <= min(limits) else "no") if limits else "?"] if report.limits else []
            table.append([*first, *sizes, *fits])
    yield f"Memory of the model {report.model!r}, batches of {report.batch_size} rows, in MiB on each device:"
    yield ""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    if any(choice.is_own for choice in report.choices):
        yield "* the R of the strategy"
    for name, size in next(iter(report.choices)).layers.items():
        yield f"The layer {name!r} looks at other rows of the batch: {format_size(size)} MiB are gathered."
    for names, limit in group_devices(report.limits):
        yield f"JAX has {format_size(limit)} MiB on {names}."


def format_size(size: int) -> str:
    """Format bytes as MiB.

    >>> format_size(3 * 2**20 // 2), format_size(2**40)
    ('1.5', '1,048,576.0')
    """
    return f"{size / MIB:,.1f}"


def group_devices(by_device: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    """Yield neighbouring devices with the same value as one.

    >>> list(group_devices({"cpu:0": 1, "cpu:1": 1, "cpu:2": 3}))
    [('cpu:0 to cpu:1', 1), ('cpu:2', 3)]
    """
    for _, items in itertools.groupby(by_device.items(), key=lambda item: item[1]):
        same = list(items)
        first, last = same[0][0], same[-1][0]
        yield first if first == last else f"{first} to {last}", same[0][1]
