"""A user function compiled for the replicas.

It is compiled over the variables that it uses.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import jax
import keras
from jax import Array

from unisono._src.engine.state import State
from unisono._src.keras.checks.jax_errors import check_optimizer_attributes, explain_function_errors
from unisono._src.keras.checks.user_code.staleness import CaptureSnapshot
from unisono._src.keras.distributed.per_replica import PerReplica
from unisono._src.keras.distributed.replica_strategy import ReplicaStrategy
from unisono._src.keras.loop.function_compiler import CompiledStep, FunctionCompiler, UserCall
from unisono._src.keras.loop.run_arguments import ArgumentTemplate, RunArguments
from unisono._src.keras.ownership import find_bond
from unisono._src.keras.private.optimizers import read_attributes
from unisono._src.keras.private.trainer_state import get_raw_values, set_raw_values
from unisono._src.keras.replica.function_outputs import OutputLeaf
from unisono._src.keras.replica.used_variables import UsedVariables
from unisono._src.typing import AnyArray, Outputs, UserFunction


class LentState:
    """The variables of a function, which borrow arrays from its step.

    A step writes the new state into the memory of the old one, so it must be the only owner of an array. It is the only owner of an
    array that it has made, until the array is handed out. Then the variable holds the array too, and so does whoever has read the variable and
    kept what it read. References are counted before an array is handed out and when it comes back: if there is one more, the variable's,
    nobody else holds it. Where Python counts in another way, the counts differ, and the array is copied.

    A second array object of the same memory for the variable would tell the same without counts. It was tried: for the twenty variables of
    a small net, a step took a sixth longer.
    """

    def __init__(self, groups: Sequence[Sequence[keras.Variable]]) -> None:
        self.variables = list(itertools.chain.from_iterable(groups))
        self._sizes = list(map(len, groups))
        self._lent: list[Array] = []
        self._counts: list[int] = []

    def take_back(self) -> State:
        """Take back the variables' values, in arrays that the step owns.

        A value that comes from elsewhere, as from an initializer or an assignment, is copied: the step does not know who owns it. The copy
        goes into the variable at once, so that there are never two of all.
        """
        arrays = []
        counts = count_references(self._lent)
        raw = get_raw_values(self.variables)
        for variable, array, lent, before, now in itertools.zip_longest(self.variables, raw, self._lent, self._counts, counts):
            if array is not lent:
                array = array.copy()
                set_raw_values([variable], [array])
            elif now != before + 1:
                array = array.copy()
            arrays.append(array)
        values = iter(arrays)
        return tuple([list(itertools.islice(values, size)) for size in self._sizes])

    def lend(self, state: State, is_whole: bool) -> None:
        """Put the newest state of the step into the variables. There may be none.

        `is_whole`: no error is on its way. The frames of an error may hold the arrays for a while, and would be counted.
        """
        arrays = list(itertools.chain.from_iterable(state))
        self._lent = arrays if is_whole else []
        self._counts = count_references(self._lent)
        if arrays:
            set_raw_values(self.variables, arrays)


def count_references(arrays: list[Array]) -> list[int]:
    return list(map(sys.getrefcount, arrays))


class CompiledFunction:
    """A user function on all replicas. A call runs it on arguments, and leaves the new state in the variables."""

    def __init__(
        self, name: str, function: UserFunction, template: ArgumentTemplate, strategy: ReplicaStrategy, eager: bool = False
    ) -> None:
        """Take a function. It is compiled at its first call, or never where it is `eager`."""
        self._call = UserCall(name, function, template, lambda: strategy.owned.layers)
        self._strategy = strategy
        self._eager = eager
        self._compiled: CompiledStep | None = None
        self._state = LentState([])
        self._captured = CaptureSnapshot(self._call.find_captures)
        self._update_settings: list[object] | None = None

    def __call__(self, arguments: RunArguments) -> Outputs:
        placement = self._strategy.placement
        batch = arguments.find_global_batch(placement)
        with explain_function_errors(self._call.name, batch, self._eager):
            if self._compiled is None:
                self._compiled = FunctionCompiler(self._call, arguments, batch, self._strategy, self._eager).compile()
                self._state = LentState(self._compiled.code.variables.all)
                for optimizer in self._compiled.code.variables.optimizers:  # one that is set later compiles the function again
                    check_optimizer_attributes(optimizer)
            step, code, divisor_check, share_positions = self._compiled
            if self._eager:
                self._mark_models_eager()
            state = self._state.take_back()
            is_whole = False
            try:
                totals, outputs = step.outputs(state, [batch], arguments.constants, arguments.carried)
                is_whole = True
            finally:
                self._state.lend(step.state, is_whole)
        for shards in arguments.rows:
            shards.report_begun()
        if divisor_check is not None:
            divisor_check.check(batch, code.fixed_divisors, list(map(read_host_number, arguments.constants)))
        if self._call.was_called:  # a trace may change what the function uses, as code that counts its traces does
            self._captured = self._captured.take_again()
            self._update_settings = read_update_settings(code.variables)
            self._call.was_called = False
        describe = step.describe_outputs(batch)

        def wrap_leaf(leaf: object) -> object:
            """Wrap an array that the function returned in a `PerReplica`."""
            if not isinstance(leaf, OutputLeaf):
                return leaf
            total = totals.get(str(leaf.place))
            is_share = leaf.place in share_positions
            return PerReplica(
                placement, (batch.rows, batch.position, batch.sizes), outputs, leaf.place, describe, total, is_share
            )

        return jax.tree.map(wrap_leaf, code.returned, is_leaf=lambda leaf: isinstance(leaf, OutputLeaf))

    def _mark_models_eager(self) -> None:
        """Mark the models whose variables the function uses. Their bits are not promised any more."""
        for model in self._strategy.owned.models:
            bond = find_bond(model)
            if bond is not None and any(id(v) in self.used for v in model.variables):
                bond.ran_eagerly = True

    @property
    def used(self) -> frozenset[int]:
        """The ids of the variables that the function uses."""
        return frozenset(map(id, self._state.variables))

    @property
    def is_current(self) -> bool:
        """Whether all that the trace took as fixed is unchanged.

        This is what the function finds by its names, frozen variables, and the settings of optimizers.
        """
        assert self._compiled is not None
        return self._captured.is_unchanged and self._update_settings == read_update_settings(self._compiled.code.variables)


def read_update_settings(variables: UsedVariables) -> list[object]:
    """Read what decides, beside arrays, how weights are updated."""
    trained = [v.trainable for v in (*variables.weights, *variables.non_trainable)]
    return [trained, *map(read_attributes, variables.optimizers)]


def read_host_number(value: AnyArray) -> float | None:
    """Read a number without asking a device. None for every other value."""
    return None if isinstance(value, jax.Array) or value.ndim else float(value)
