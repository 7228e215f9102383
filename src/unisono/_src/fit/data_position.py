"""The course of one call of `fit`: where it is in its data, and how it goes on where an earlier one stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from unisono._src import keras_private
from unisono._src.data.global_batch import Position
from unisono._src.data.progress import Place, Progress, restored
from unisono._src.data.row_order import Order


class Course:
    """Made when fit has its source of data; callbacks find it at the model's bond."""

    def __init__(self, epochs: keras_private.Epochs, callbacks: list[Any]) -> None:
        self.epochs = epochs
        self._bounds: list[Callable[[int], int]] = keras_private.bounds_of(callbacks)
        """They say, for the step that comes next, how many may be taken at once so that a callback sees the one it waits for."""
        self.order: Order = epochs.adapter.order
        self.progress = Progress(self.order.passes)
        self.logs: Any = {}
        """Of the last step."""
        self._before_step: Callable[[], None] | None = None
        if not epochs.adapter.has_index and keras_private.has_keeper(callbacks):
            self.progress.count_all()

    def trained(self, batches: list[Any], position: Position | None, logs: Any) -> None:
        """These were trained on, the last of them at this position, and the last step said this."""
        self.logs = logs
        if position is not None:
            for batch in batches[:-1] if self.progress.counts_all else ():
                self.progress.trained(batch, position_of(batch) or position, self.epochs.adapter.size)
            self.progress.trained(batches[-1], position, self.epochs.adapter.size)
            self.order.trained_on(position[0])

    def nothing_left(self) -> Any:
        """In place of a step, where the epoch was stopped behind its last one: what that one said."""
        if self.progress.position is not None:
            self.order.trained_on(self.progress.position[0])
        return self.logs

    def most_steps(self, step: int) -> int | None:
        """How many may be taken in one call."""
        return min((bound(step) for bound in self._bounds), default=None)

    def before_step(self) -> None:
        """When all callbacks have had their say, and a step is about to take the state."""
        act, self._before_step = self._before_step, None
        if act is not None:
            act()

    def get_state(self, end_of_epoch: bool) -> dict[str, Any]:
        """In JSON."""
        place = self.progress.place
        if place is not None and end_of_epoch and self.epochs.pass_is_over(place.position[1]):
            place = place._replace(position=(place.position[0] + 1, 0))
        return {"seeds": seeds_of(self.epochs.adapter), "place": None if place is None else place._asdict()}

    def go_on(self, state: dict[str, Any], step: int, logs: Any, before_step: Callable[[], None] | None) -> None:
        """The next epoch begins with this step of a course that had this state. `before_step` is called before it is taken."""
        adapter = self.epochs.adapter
        set_seeds(adapter, state["seeds"])
        if state["place"] is None:
            return
        place = Place.of_json(state["place"])
        batches, chain = adapter.from_place(place)
        self.progress = restored(place, chain)
        self.epochs.begin_at(step, batches, place.position[1])
        self.logs, self._before_step = logs, before_step


def position_of(batch: Any) -> Position | None:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return getattr(leaves[0], "position", None)


def seeds_of(adapter: Any) -> list[int]:
    return adapter.source.seeds if hasattr(adapter.source, "seeds") else [adapter.order.seed]


def set_seeds(adapter: Any, seeds: list[int]) -> None:
    if hasattr(adapter.source, "seeds"):
        adapter.source.seeds = seeds
    else:
        (adapter.order.seed,) = seeds
