"""Digests of traced programs.

Two programs have one digest if their results are computed alike from the same constants. A result's digest covers its equation and the
digests of all that the equation reads, down to the inputs and constants. Nothing else changes a digest: neither the order of independent
equations, nor their names, nor whether a function is called or inlined, nor what no result needs (`jax.debug.print`).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from unisono._src.programs.inlining import CALLS
from unisono._src.programs.operands import Atom
from unisono._src.programs.private.jaxprs import close_program, count_loop_inputs
from unisono._src.typing import UserObject

PLAIN = (type(None), bool, int, float, complex, str, bytes, np.dtype, enum.Enum)

UNSEEN = (jax.Device, jax.sharding.Sharding, jax.sharding.Mesh, jax.tree_util.PyTreeDef)
"""Parameters that say where a program runs, or repeat what its types say."""


def digest_program(program: ClosedJaxpr) -> int:
    """Digest a program to 31 bits. The digest is not 0.

    >>> one, other = (jax.make_jaxpr(lambda x, factor=factor: x * factor)(1.0) for factor in (2.0, 3.0))
    >>> digest_program(one) == digest_program(other)
    False
    """
    return int.from_bytes(ProgramDigester().digest_whole(program)[:4]) >> 1 or 1


class ProgramDigester:
    """Digests of programs that may share inner programs."""

    def __init__(self) -> None:
        self._inner: dict[int, tuple[UserObject, bytes]] = {}
        """The digests of inner programs of equations, by id; and the programs themselves, so that no other one takes the id."""
        self.not_described: set[type] = set()
        """Types of parameters that count only by the name of their type."""

    def digest_whole(self, program: ClosedJaxpr) -> bytes:
        """Digest a program as a function of its inputs.

        The digest covers its results, and what it leaves in references among its inputs.
        """
        variables = program.jaxpr.invars
        known = {variable: combine("input", str(number), describe_type(variable)) for number, variable in enumerate(variables)}
        results = self._digest_results(program, known)
        return combine(
            "program", str(len(variables)), *results, *(known[variable] for variable in variables if is_reference(variable))
        )

    def _digest_results(self, program: ClosedJaxpr, known: dict[Var, bytes]) -> list[bytes]:
        """Digest a program's results. `known` has the digests of its inputs, and gets those of its variables."""
        constants = zip(program.jaxpr.constvars, program.consts, strict=True)
        known |= {variable: hash_constant(value) for variable, value in constants}

        def read(atom: Atom) -> bytes:
            return combine(describe_type(atom), hash_constant(atom.val)) if isinstance(atom, Literal) else known[atom]

        for equation in program.jaxpr.eqns:
            results = self._digest_equation(equation, list(map(read, equation.invars)))
            known |= zip(equation.outvars, results.of_outputs, strict=True)
            known |= {atom: combine("after", results.whole, known[atom]) for atom in equation.invars if is_reference(atom)}
        return list(map(read, program.jaxpr.outvars))

    def _digest_equation(self, equation: JaxprEqn, operands: Sequence[bytes]) -> EquationDigests:
        """Digest an equation and its results. For a call, these are the digests of the function that is called."""
        name = equation.primitive.name
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr")) if name in CALLS else None
        if called is not None and not any(map(is_reference, equation.invars)):
            inner = close_program(called)
            return EquationDigests(b"", self._digest_results(inner, dict(zip(inner.jaxpr.invars, operands, strict=True))))
        params = [part for key, value in sorted(equation.params.items()) for part in (key, self._describe(value))]
        if name == "scan":
            params += map(str, count_loop_inputs(equation.params))
        whole = combine(name, *params, *operands)
        outputs = enumerate(equation.outvars)
        return EquationDigests(whole, [combine(whole, str(number), describe_type(output)) for number, output in outputs])

    def _describe(self, value: UserObject) -> str:
        """Describe what counts of a parameter, without addresses. Of a function only its being there counts."""
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            if id(value) not in self._inner:
                self._inner[id(value)] = value, self.digest_whole(close_program(value))
            return self._inner[id(value)][1].hex()
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return hash_constant(value).hex()
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(self._describe, value))})"
        if isinstance(value, Mapping):
            return f"{{{','.join(sorted(f'{key}:{self._describe(item)}' for key, item in value.items()))}}}"
        if isinstance(value, Set):
            return f"{{{','.join(sorted(map(self._describe, value)))}}}"
        parts = list_parts(value)
        if parts is None:
            self.not_described.add(type(value))
            return type(value).__name__
        return f"{type(value).__name__}{self._describe(parts)}"


class EquationDigests(NamedTuple):
    """The digests of an equation and of its results."""

    whole: bytes
    of_outputs: list[bytes]


def list_parts(value: UserObject) -> Mapping[str, UserObject] | None:
    """List what counts of an object. None if only its type does."""
    if isinstance(value, Primitive):
        return {"name": value.name}
    if isinstance(value, ShapedArray):
        return {"shape": value.shape, "dtype": value.dtype}
    if isinstance(value, lax.Tolerance):
        return vars(value)
    if hasattr(value, "val") and isinstance(value.val, np.ndarray):  # of a call of a kernel: JAX wraps arrays
        return {"val": value.val}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, *UNSEEN)):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def describe_type(atom: Atom) -> str:
    """Describe a value's dtype and shape. A weak type has decided what was traced, and decides nothing more."""
    return f"{getattr(atom.aval, 'dtype', type(atom.aval).__name__)}{getattr(atom.aval, 'shape', '')}"


def is_reference(atom: Atom) -> bool:
    """Whether a value is a reference to memory, which equations write."""
    return hasattr(atom.aval, "inner_aval")


def hash_constant(value: UserObject) -> bytes:
    """Digest an array or a number."""
    if isinstance(value, Tracer):
        return combine("traced", str(value.aval))
    dtype = str(value.dtype) if hasattr(value, "dtype") else ""
    array = np.asarray(replace_keys(value))
    return combine(dtype, str(array.dtype), str(array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes())


def replace_keys(value: UserObject) -> UserObject:
    """Replace random keys by their numbers. All else stays as it is."""
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def combine(*parts: str | bytes) -> bytes:
    """Combine parts to a digest, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.digest()
