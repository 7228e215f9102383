"""Digests of traced programs: two programs have one digest if their results are computed alike from the same constants.

A result's digest is made of its equation and of the digests of what the equation reads, down to the inputs and constants. So the order of
equations that do not depend on each other, their names, functions that are called in place of being written out, and what no result needs
(`jax.debug.print`) make no other digest.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from unisono._src.inlining import CALLS, Atom
from unisono._src.jax_private.jaxprs import close_program
from unisono._src.typing import UserObject

PLAIN = (type(None), bool, int, float, complex, str, bytes, np.dtype)


def digest_program(program: ClosedJaxpr) -> int:
    """Return a digest of 31 bits; it is not 0.

    >>> one, other = (jax.make_jaxpr(lambda x, factor=factor: x * factor)(1.0) for factor in (2.0, 3.0))
    >>> digest_program(one) == digest_program(other)
    False
    """
    return int.from_bytes(ProgramDigester().digest_whole(program)[:4]) >> 1 or 1


class ProgramDigester:
    """Digests of programs that may hold the same programs inside."""

    def __init__(self) -> None:
        self._inner: dict[int, tuple[UserObject, bytes]] = {}
        """The digests of programs inside of equations, by their ids; and the programs, so that no other takes the id."""

    def digest_whole(self, program: ClosedJaxpr) -> bytes:
        """Return the digest of a program as a function of its inputs."""
        inputs = [combine("input", str(number), str(variable.aval)) for number, variable in enumerate(program.jaxpr.invars)]
        return combine("program", str(len(inputs)), *self._digest_results(program, inputs))

    def _digest_results(self, program: ClosedJaxpr, inputs: Sequence[bytes]) -> list[bytes]:
        """Return the digests of a program's results."""
        jaxpr = program.jaxpr
        known: dict[Var, bytes] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {variable: digest_constant(value) for variable, value in zip(jaxpr.constvars, program.consts, strict=True)}

        def read(atom: Atom) -> bytes:
            return combine(str(atom.aval), digest_constant(atom.val)) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            known |= zip(equation.outvars, self._digest_equation(equation, list(map(read, equation.invars))), strict=True)
        return list(map(read, jaxpr.outvars))

    def _digest_equation(self, equation: JaxprEqn, operands: Sequence[bytes]) -> list[bytes]:
        """Return the digests of an equation's results: of a call, those of the function that is called."""
        name = equation.primitive.name
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr")) if name in CALLS else None
        if called is not None:
            return self._digest_results(close_program(called), operands)
        params = [part for key, value in sorted(equation.params.items()) for part in (key, self._describe(value))]
        whole = combine(name, *params, *operands)
        return [combine(whole.hex(), str(number)) for number in range(len(equation.outvars))]

    def _describe(self, value: UserObject) -> str:
        """Return what counts of a parameter, in a text without addresses. Of a function only its being there counts."""
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            if id(value) not in self._inner:
                self._inner[id(value)] = value, self.digest_whole(close_program(value))
            return self._inner[id(value)][1].hex()
        if isinstance(value, (*PLAIN, enum.Enum)):
            return repr(value)
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return digest_constant(value).hex()
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(self._describe, value))})"
        if isinstance(value, Mapping):
            return f"{{{','.join(sorted(f'{key}:{self._describe(item)}' for key, item in value.items()))}}}"
        if isinstance(value, Set):
            return f"{{{','.join(sorted(map(self._describe, value)))}}}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (f"{field.name}={self._describe(getattr(value, field.name))}" for field in dataclasses.fields(value))
            return f"{type(value).__name__}({','.join(fields)})"
        return type(value).__name__


def digest_constant(value: UserObject) -> bytes:
    """Return the digest of an array, or of a number."""
    if isinstance(value, Tracer):
        return combine("traced", str(value.aval))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    return combine(str(array.dtype), str(array.shape), array.reshape(-1).view(np.uint8).tobytes())


def combine(*parts: str | bytes) -> bytes:
    """Return a digest of parts, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.digest()
