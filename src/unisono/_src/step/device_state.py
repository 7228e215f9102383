"""What the devices of a placement hold between the calls of a step: the state, the sums, the constants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from unisono._src.placement import Placement
from unisono._src.replica.protocol import Functions, State
from unisono._src.step.program import Work


class Held:
    """The lead holds the newest state; other devices get it from there when they next need it."""

    def __init__(self, functions: Functions, placement: Placement, homes: Collection[int]) -> None:
        """`homes` are the devices that finish steps."""
        self._functions = functions
        self._placement = placement
        self._homes = homes
        self._work: dict[int, Work] = {}
        self.current: set[int] = set()
        """The devices that hold the state of now, not of a step before."""
        self._returned: list[Any] = []
        self._references: dict[int, int] = {}
        self._constants: dict[int, list[Any]] = {}

    def __getitem__(self, index: int) -> Work:
        return self._work[index]

    def __setitem__(self, index: int, work: Work) -> None:
        self._work[index] = work

    def receive(self, state: State, sums: Callable[[], Any]) -> None:
        """Takes the state from Keras' loop, which hands back what it was given unless a callback has assigned something.

        `sums` makes empty ones, contributions' and divisors', for the first state.
        """
        leaves = list(itertools.chain.from_iterable(state))
        if (
            0 in self._work
            and len(leaves) == len(self._returned)
            and all(a is b for a, b in zip(leaves, self._returned, strict=True))
        ):
            return
        state = tuple(jax.device_put([list(group) for group in state], self._placement.lead))
        found = self._work[0][1:] if 0 in self._work else jax.device_put(sums(), self._placement.lead)
        self._work[0] = Work(state, *found)
        self.current = {0}

    def on(self, index: int) -> Work:
        """What this device goes on from: the state as it is now, as far as its replicas read it."""
        if index not in self.current:
            state = self._work[0].state
            source = [list(group) if read else None for group, read in zip(state, self._read(index), strict=True)]
            scales = {(group, position): state[group][position] for group, position in self._functions.scales()}
            device = self._placement.devices[index]
            sent_groups, scales = jax.device_put((source, scales), device)
            if index not in self._work:
                idle = [[np.zeros(a.shape, a.dtype) for a in group] for group in state]
                sums = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._work[0][1:])
                self._work[index] = Work(tuple(jax.device_put(idle, device)), *jax.device_put(sums, device))
            groups = [new if new is not None else old for new, old in zip(sent_groups, self._work[index].state, strict=True)]
            for (group, position), value in scales.items():
                groups[group] = [*groups[group][:position], value, *groups[group][position + 1 :]]
            self._work[index] = self._work[index]._replace(state=tuple(groups))
            self.current.add(index)
        return self._work[index]

    def finished_on(self, homes: Collection[int]) -> None:
        """These devices have finished a step; what the others hold is of before."""
        self.current = set(homes)

    def _read(self, index: int) -> list[bool]:
        """Which groups of the state this device reads, beside scales: all where it finishes steps."""
        return [index in self._homes or read for read in self._functions.read()]

    def keep(self, constants: Sequence[Any]) -> None:
        """The constants of this call."""
        self._constants = {0: list(constants)}

    def constants(self, index: int = 0) -> list[Any]:
        """On a device."""
        if index not in self._constants:
            self._constants[index] = jax.device_put(self._constants[0], self._placement.devices[index])
        return self._constants[index]

    def handed_out(self) -> State:
        """The newest state, as the loops hold it from now on."""
        state = self._work[0].state
        self._returned = list(itertools.chain.from_iterable(state))
        self._references = {id(array): 2 for array in self._returned}  # that list, and what the lead holds
        return state

    def references(self, array: Any) -> int:
        """How many references to an array of the state are held here."""
        return self._references.get(id(array), 0)

    def forget(self) -> None:
        """Lets go of what lies on the devices."""
        self._work, self.current, self._returned = {}, set(), []
