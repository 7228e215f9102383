"""The loss of a step that does not report one.

It is a NaN that no arithmetic makes, so that records tell it from a loss that became NaN.
"""

from __future__ import annotations

import numpy as np

UNTOLD_LOSS = np.array(0x7FC0_0001, np.uint32).view(np.float32)[()]


def list_told(losses: np.ndarray) -> list[float | None]:
    """List float32 losses, with None for those not reported."""
    losses = np.ascontiguousarray(losses, np.float32)
    is_untold = losses.view(np.uint32) == UNTOLD_LOSS.view(np.uint32)
    return [None if untold else loss for loss, untold in zip(losses.tolist(), is_untold.tolist(), strict=True)]
