"""The digest of a program is of what its results are computed from, and of nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr

import unisono as un
from families import FAMILIES
from sizes import slow
from unisono._src.kernels.rewriting import trace_observers
from unisono._src.programs.program_digest import UNSEEN, ProgramDigester, digest_program


def digest(function: Any, *args: Any) -> int:
    return digest_program(jax.make_jaxpr(function)(*args or (np.ones(4, np.float32),)))


def scaled(factor: Any) -> Any:
    return lambda x: jnp.sin(x) * factor


def looped(factor: Any, steps: int = 3) -> Any:
    return lambda x: lax.scan(lambda carry, _: (carry * factor, carry.sum()), x, None, length=steps)


def chosen(factor: Any) -> Any:
    return lambda x: lax.cond(x[0] > 0, lambda x: x * factor, lambda x: x, x)


@pytest.mark.parametrize(
    "make",
    [scaled, looped, chosen, lambda factor: jax.jit(scaled(factor)), lambda factor: jax.grad(lambda x: scaled(factor)(x).sum())],
)
@pytest.mark.parametrize(
    "kinds",
    [
        (float, float),
        (np.float32, np.float32),
        (partial(np.full, 4), partial(np.full, 4)),
        (partial(jnp.full, 4), partial(jnp.full, 4)),
    ],
)
def test_a_constant_counts_wherever_it_stands(make, kinds):
    one, other = kinds
    assert digest(make(one(2.0))) == digest(make(other(2.0)))
    assert digest(make(one(2.0))) != digest(make(other(2.0000002)))


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)
def test_captured_arrays_count_to_the_bit(one, other):
    arrays = np.array(one, np.float32), np.array(other, np.float32)
    same = arrays[0].tobytes() == arrays[1].tobytes()
    digests = [digest(lambda x, array=array: x.sum() + array) for array in arrays]
    assert (digests[0] == digests[1]) == same


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (jnp.cos(x) + 1, x * 2),
        lambda x: (jnp.cos(x) * 1, x + 2),
        lambda x: (x * 2, jnp.cos(x) + 1, x),
        lambda x: (jnp.cos(x) + 1, x * np.float16(2)),
        lambda x: (jnp.cos(x[::-1]) + 1, x + 2),
    ],
)
def test_other_operations_count(other):
    assert digest(other) != digest(lambda x: (jnp.cos(x) + 1, x + 2))


def test_the_number_of_steps_of_a_loop_counts():
    assert digest(looped(2.0, 3)) != digest(looped(2.0, 4))


def test_shapes_and_dtypes_of_inputs_count():
    digests = {digest(lambda x: x + x, np.ones(shape, dtype)) for shape in (3, 4) for dtype in (np.float32, np.int32)}
    assert len(digests) == 4


def test_what_no_result_needs_does_not_count():
    def told(x):
        jax.debug.print("sum {}", jnp.exp(x).sum())
        return jnp.sin(x) * 2.0

    def wasted(x):
        jnp.exp(x)
        return jnp.sin(x) * 2.0

    assert digest(told) == digest(wasted) == digest(scaled(2.0))


def test_the_order_of_equations_that_do_not_depend_on_each_other_does_not_count():
    def backwards(x):
        second = x * 3.0
        return jnp.sin(x), second

    assert digest(backwards) == digest(lambda x: (jnp.sin(x), x * 3.0))
    assert digest(lambda x: x * 2.0 + x * 3.0) != digest(
        lambda x: x * 3.0 + x * 2.0
    )  # which rounds as it does, but may be compiled otherwise


def test_a_function_that_is_called_counts_as_written_out():
    inner = jax.jit(lambda x: x * 2.0)
    again = jax.jit(lambda x: x * 2.0)
    assert (
        digest(lambda x: inner(x) + inner(x + 1))
        == digest(lambda x: inner(x) + again(x + 1))
        == digest(lambda x: x * 2.0 + (x + 1) * 2.0)
    )


def test_keys_count():
    def drawn(seed: int) -> Any:
        key = jax.random.key(seed)
        return lambda x: x + jax.random.normal(key, x.shape)

    assert digest(drawn(0)) == digest(drawn(0)) != digest(drawn(1))

    def of_kind(kind: str) -> Any:
        key = jax.random.key(0, impl=kind)
        return lambda x: x + jax.random.bits(key, (4,)).astype(np.float32)

    assert digest(of_kind("rbg")) != digest(of_kind("unsafe_rbg"))


def called_back(shape: tuple[int, ...]) -> Any:
    return lambda x: jax.pure_callback(lambda x: np.ones(shape, np.float32), jax.ShapeDtypeStruct(shape, np.float32), x).sum()


def carried(how: int) -> Any:
    """A value that a loop carries along as it is, or has as a constant."""

    def with_constant(x: Any) -> Any:
        return lax.scan(lambda carry, _: (carry + x[0], carry), x[1], None, length=3)

    def with_two(x: Any) -> Any:
        (_, carry), outs = lax.scan(lambda carry, _: ((carry[0], carry[1] + carry[0]), carry[1]), (x[0], x[1]), None, length=3)
        return carry, outs

    return (with_constant, with_two)[how]


def written(factor: float) -> Any:
    def function(x: Any) -> Any:
        place = jax.new_ref(x)
        place[...] = x * factor
        return place[...]

    return function


def reduced(function: Any, first: float) -> Any:
    return lambda x: lax.reduce_window(x, np.float32(first), function, (2,), (1,), "VALID")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (called_back((3,)), called_back((5,))),
        (carried(0), carried(1)),
        (written(2.0), written(3.0)),
        (jax.jit(written(2.0)), jax.jit(written(3.0))),
        (reduced(lax.max, -np.inf), reduced(lax.min, -np.inf)),
        (lambda x: x + np.ones((), np.float32), lambda x: x + np.ones(1, np.float32)),
        (lambda x: x.astype(np.int32), lambda x: x.astype(np.int8)),
        (lambda x: x[:2], lambda x: x[1:3]),
        (lambda x: jnp.fft.fft(x), lambda x: jnp.fft.ifft(x) * 4),
        (lambda x: lax.exp(x, accuracy=lax.Tolerance(1e-3, 0, 0)), lambda x: lax.exp(x, accuracy=lax.Tolerance(1e-6, 0, 0))),
    ],
)
def test_what_a_program_does_counts(one, other):
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_a_reference_that_is_read_counts_once_it_was_written():
    assert digest(written(2.0)) == digest(written(2.0))


def traced_step(family: str) -> list[ClosedJaxpr]:
    """Return the programs of a step of a family."""
    programs: list[ClosedJaxpr] = []

    def observe(name: str, program: ClosedJaxpr) -> None:
        if name == "train":
            programs.append(program)

    model, compile_, data = FAMILIES[family]()
    trace_observers.append(observe)
    try:
        with un.OneDeviceStrategy(replicas=2).scope():
            model = keras.models.clone_model(model)
        model.compile(**compile_)
        model.fit(**{name: first_rows(rows) for name, rows in data.items()}, batch_size=8, verbose=0)
    finally:
        trace_observers.remove(observe)
    return programs


def first_rows(rows: Any) -> Any:
    if isinstance(rows, dict):
        return {
            name: rows_of_name if isinstance(rows_of_name, float) else rows_of_name[:8] for name, rows_of_name in rows.items()
        }
    return rows[:8]


@pytest.mark.parametrize("family", ["attention", *slow("conv", "lstm", "gru", "several_outputs")])
def test_only_functions_are_left_out_of_the_programs_of_steps(family):
    """What an operation does stands in its parameters: each type of them is described."""
    programs = traced_step(family)
    digester = ProgramDigester()
    assert len({digester.digest_whole(program) for program in programs}) == len(programs) > 0
    left_out = {kind for kind in digester.not_described if not issubclass(kind, UNSEEN)}
    assert {kind.__name__ for kind in left_out} <= {"function", "partial", "CoalescedFlatTree"}


def test_the_numbers_of_a_kernel_count():
    def called(*numbers: float) -> int:
        call = jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct((4,), np.float32))
        return digest(lambda x: call(x, numbers=np.array(numbers, np.float32), count=len(numbers)))

    assert called(0.5, 1.0) == called(0.5, 1.0) != called(0.25, 1.0)
