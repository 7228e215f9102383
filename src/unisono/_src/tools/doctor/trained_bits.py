"""The bits of a placement in the self-test. They show at which step two placements part."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainedBits:
    """The bits that a placement computed, as fingerprints."""

    placement: str
    """The placement, in words."""
    steps: list[str]
    """The fingerprint of the model after each step."""
    variables: dict[str, str]
    """The fingerprint of each variable of model and optimizer at the end, by name."""
    seconds: float

    @property
    def fingerprint(self) -> str:
        return self.steps[-1]

    def describe_parting(self, other: TrainedBits) -> str:
        """Describe where this training parts from another one. "" if the bits are equal."""
        if self.steps == other.steps:
            return ""
        step = next(number for number, pair in enumerate(zip(self.steps, other.steps, strict=True), 1) if pair[0] != pair[1])
        names = [name for name, bits in self.variables.items() if bits != other.variables.get(name)]
        return f"parts at step {step} of {len(self.steps)}, in {', '.join(names) or 'no variable that is left at the end'}"
