"""Logs as functions of the metrics' variables: the program of a step shows which logs it computes from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from unisono._src.typed_jax import jaxpr_as_fun
from unisono._src.typing import Array
from unisono._src.xla.rewrite.equations import drop_names


class MetricsFunction(NamedTuple):
    """A log as a function of the metrics' variables."""

    program: ClosedJaxpr
    read: list[int]
    """The positions of the variables that it reads."""

    def __call__(self, metric_values: Sequence[Array]) -> Array:
        (log,) = jaxpr_as_fun(self.program)(*(metric_values[position] for position in self.read))
        return log


class CutProgram:
    """The program of a step that returns the metrics' variables and then logs, cut where these variables have their last values."""

    def __init__(self, program: ClosedJaxpr, count: int) -> None:
        """`count` is the number of the metrics' variables."""
        self._program = program
        outputs = program.jaxpr.outvars
        self._logs = outputs[count:]
        self._places: dict[Var, int] = {}
        for place, variable in enumerate(outputs[:count]):
            if not isinstance(variable, Literal):
                self._places.setdefault(variable, place)
        constants = zip(program.jaxpr.constvars, program.consts, strict=True)
        self._constants = {variable: value for variable, value in constants if not isinstance(value, Tracer)}

    def find_function(self, index: int) -> tuple[MetricsFunction | None, bool]:
        """Return a log as a function of the metrics' variables, if it is one, and whether it is made of them and of something else."""
        log = self._logs[index]
        if isinstance(log, Literal):
            return None, False
        needed = {log}
        equations: list[JaxprEqn] = []
        for eqn in reversed(self._program.jaxpr.eqns):
            if needed.intersection(eqn.outvars) - self._places.keys():
                equations.insert(0, eqn)
                needed.update(atom for atom in eqn.invars if isinstance(atom, Var))
        made = {variable for eqn in equations for variable in eqn.outvars}
        read = [variable for variable in self._places if variable in needed]
        others = needed - made - self._constants.keys() - self._places.keys()
        if others or not read or made.intersection(read):
            return None, bool(read)
        constants = [variable for variable in self._constants if variable in needed]
        program = self._program.jaxpr.replace(
            constvars=constants, invars=read, outvars=[log], eqns=equations, debug_info=drop_names(self._program.jaxpr)
        )
        values = [self._constants[variable] for variable in constants]
        return MetricsFunction(ClosedJaxpr(program, values), [self._places[variable] for variable in read]), False
