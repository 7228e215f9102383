"""Sums inside of the step program, over CPU devices of one process.

The devices' executions meet in a kernel, which adds in the order of the reduction tree. So the steps of several devices are one call, as
those of a single device are.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono._src.engine import reduction_tree
from unisono._src.engine.device_mesh import DeviceMesh
from unisono._src.engine.exchange.protocol import Node
from unisono._src.kernels.native.library import load_kernels
from unisono._src.kernels.native.step_calls import has_group, make_group


def can_add_in_programs(mesh: DeviceMesh) -> bool:
    """Whether programs on these devices can add up inside: they share memory, and there are kernels."""
    return mesh.size > 1 and mesh.shares_memory and load_kernels().level is not None


class DeviceGroups:
    """The groups in which the devices of one step add up. Another step, which may run at the same time, has groups of its own."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, tuple[range, ...]], int] = {}

    def find(self, leaves: int, nodes: Sequence[Node | None]) -> int:
        """Find the number of the group whose devices have these nodes. All of them have rows. It is 0 for a device alone."""
        spans = tuple(node[0] for node in nodes if node is not None)
        if len(spans) == 1:
            return 0
        if not has_group(self._groups.get((leaves, spans), 0)):
            self._groups[leaves, spans] = make_group(len(spans), list_additions(leaves, spans))
        return self._groups[leaves, spans]


def list_additions(leaves: int, spans: Sequence[range]) -> list[tuple[int, int]]:
    """List the additions of devices' sums, in the order of the tree. Each is (device, other): the first takes in the other's sum.

    >>> list_additions(8, [range(0, 2), range(2, 4), range(4, 8)])
    [(0, 1), (0, 2)]
    """
    additions: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        additions.append((left, right))
        return left

    reduction_tree.sum_tree(range(leaves), spans.__contains__, spans.index, add)
    return additions
