"""An equation of a step, and where it is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unisono._src.phases.kinds import Layout, Merge
from unisono._src.phases.twins import Equation


@dataclasses.dataclass(frozen=True)
class Planned:
    """An equation and where it is computed."""

    equation: Equation
    in_shards: bool
    """Whether each shard computes it, on its rows. Else it is computed once, as traced for the whole batch."""
    layouts: Sequence[Layout | None] = ()
    """Where the operands have rows, as shards read them."""
    merges: Sequence[Merge | None] = ()
    """For each output how the parts of shards become one value; None for what stays in the shards."""
    inside: bool = False
    """Whether it is in a layer of which each replica has its own, and reads such values of its own replica."""
    counts_locally: bool = False
    """Whether literals are those of the shard's own program."""
