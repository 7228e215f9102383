"""The base of strategies. The loop, the hooks of fit and the checks use this part of a strategy."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping

import keras

from unisono._src.engine.exchange import LeadExchange, choose_exchange, choose_lead_exchange
from unisono._src.engine.exchange.protocol import Exchange
from unisono._src.keras.checks import refusals
from unisono._src.keras.ownership import OwningStrategy
from unisono._src.placement import Placement
from unisono._src.processes.agreement import Agreement


class Scopes(threading.local):
    """The strategies whose scopes this thread is in, innermost last."""

    def __init__(self) -> None:
        self.open: list[ReplicaStrategy] = []
        self.acting: list[ReplicaStrategy] = []
        """Strategies whose steps call user code, in a scope or not."""

    @property
    def innermost(self) -> ReplicaStrategy | None:
        """The strategy of the innermost scope; None outside of every scope."""
        return self.open[-1] if self.open else None


SCOPES = Scopes()


class ReplicaStrategy(OwningStrategy):
    """A strategy as the loop and the hooks of fit use it. Every process uses it in the same order."""

    agreement = Agreement()
    """The agreement of the processes that run the replicas. By default this process runs all."""

    def __init__(
        self, deterministic: bool, is_number_of_machine: bool, verify: float | None = None, shard: str | None = None
    ) -> None:
        super().__init__(deterministic, shard)
        self.verify = verify
        """The share of steps that are verified; None where none is asked for."""
        self._to_announce = is_number_of_machine
        self._said: set[str] = set()

    @functools.cached_property
    def exchange(self) -> Exchange:
        return choose_exchange(self.placement)

    @functools.cached_property
    def on_lead(self) -> tuple[Placement, LeadExchange]:
        """The placement and exchange of steps that are not compiled. All replicas of this process are on its first device."""
        placement = self.placement.on_lead()
        return placement, choose_lead_exchange(placement)

    @property
    def writes(self) -> bool:
        """Whether this process writes files and shows progress for all."""
        return self.agreement.is_first

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Let user code in the block find this strategy by `get_strategy`.

        The block is for steps that call user code, in a scope or not.
        """
        SCOPES.acting.append(self)
        try:
            yield
        finally:
            SCOPES.acting.pop()

    def announce(self) -> None:
        """Print once, at the first fit, that R came from the machine."""
        if self._to_announce:
            self._to_announce = False
            replicas = self.num_replicas_in_sync
            print(f"R = {replicas} from this machine; write replicas={replicas} to get these bits elsewhere", file=sys.stderr)

    def warn_of_slow_steps(self, what: str) -> None:
        """Warn once of a model or a function that is not compiled."""
        if what in self._said:
            return
        self._said.add(what)
        warnings.warn(
            f"{what}: it runs on {self.devices[0]}, operation by operation, which is slow and has other last bits "
            f"than a compiled run. Fingerprints of what is trained so begin with 'unpromised-'. Compile it again when you are done with "
            f"debugging.",
            stacklevel=3,
        )

    def agree(self, variables: list[keras.Variable]) -> None:
        """Give the variables the same values in all processes. To be called before they are first used."""

    def check_alike(self, what: Mapping[str, object]) -> None:
        """Refuse values that differ between processes. The keys are names for the message."""
        self.agreement.check({name: repr(value) for name, value in what.items()})

    def check_variables(self, variables: list[keras.Variable], assigned: list[keras.Variable]) -> None:
        """Refuse variables of other strategies in replica code.

        Assigned variables are refused too, if replicas cannot agree on their new value.
        """
        refusals.check_replica_variables(variables, self)
        refusals.check_assigned_variables(assigned, self)
