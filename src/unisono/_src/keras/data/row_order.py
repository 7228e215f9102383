"""The order of rows, as a function of (seed, pass, batch).

A pass reads the data once; passes are counted over the model's life, so that two fits of one epoch equal one fit of two
epochs. NumPy promises the streams of `RandomState` for all its versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
import secrets
from collections.abc import Generator

import numpy as np

from unisono._src.keras.private.data_adapters import get_random_seed
from unisono._src.processes.agreement import get_agreement


def draw_seed() -> int:
    """Draw the seed of a model's data order.

    It comes from `keras.utils.set_random_seed`, else from the state of NumPy's generator. Nothing is drawn from the generator: the layers
    of the model must start from the numbers that plain Keras gives them. Among several processes the first one decides.
    """
    return get_agreement().of_first("the seed of the order of rows", read_seed)


def read_seed() -> int:
    seed = get_random_seed()
    if seed is not None:
        return seed
    state = np.random.get_state(legacy=False)
    return int.from_bytes(hashlib.sha256(pickle.dumps(sorted(state["state"].items(), key=str))).digest()[:8])


@dataclasses.dataclass
class RowOrder:
    """The order of a model's data: its seed, and its passes. `passes` counts the passes that the model has begun to train on."""

    seed: int = dataclasses.field(default_factory=lambda: secrets.randbits(32))
    passes: int = 0

    def random(self, *position: int) -> np.random.RandomState:
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, *position])))

    def permute_pass(self, pass_: int, count: int) -> np.ndarray:
        """Permute `count` rows or batches for a pass."""
        return self.random(pass_).permutation(count)

    def permute_batch(self, pass_: int, batch: int, rows: int) -> np.ndarray:
        return self.random(pass_, batch).permutation(rows)

    def note_pass(self, pass_: int) -> None:
        """Note that a batch of this pass was trained on. The next pass is a later one."""
        self.passes = max(self.passes, pass_ + 1)

    @contextlib.contextmanager
    def keep_passes(self) -> Generator[None]:
        """Count no pass that the block begins. The block looks at a first batch, and trains on none."""
        passes = self.passes
        try:
            yield
        finally:
            self.passes = passes
