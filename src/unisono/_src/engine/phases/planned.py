"""An equation of a step, and where it is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unisono._src.engine.phases.kinds import Layout, Merge
from unisono._src.engine.phases.twins import Equation


@dataclasses.dataclass(frozen=True)
class Planned:
    """An equation and where it is computed."""

    equation: Equation
    in_shards: bool
    """Whether each shard computes it, on its rows. Else it is computed once, as traced for the whole batch."""
    layouts: Sequence[Layout | None] = ()
    """Where the operands have rows, as shards read them."""
    merges: Sequence[Merge | None] = ()
    """How the shards' parts of each output become one value; None for what stays in the shards."""
    inside: bool = False
    """Whether it is in a layer whose values are a replica's own, and reads those of its own replica."""
    counts_locally: bool = False
    """Whether literals are those of the shard's own trace."""
