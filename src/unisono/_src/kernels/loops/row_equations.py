"""Translate equations into instructions for rows, if rows are independent in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from jax.extend.core import JaxprEqn, Var

from unisono._src.kernels.loops.row_steps import NotByRowsError, RowStep, Value, measure_row
from unisono._src.programs.operands import Atom, get_dtype, get_shape

OPERATIONS = {
    "abs": "absolute", "exp": "exponential", "logistic": "logistic", "neg": "negate", "sqrt": "square root", "tanh": "tangent",
    "add": "add", "add_any": "add", "div": "divide", "max": "larger", "min": "smaller", "mul": "multiply", "sub": "subtract",
    "eq": "equal", "le": "less or equal", "lt": "less", "ne": "unequal", "and": "multiply", "or": "larger",
}  # fmt: skip
"""The operations on single elements that are one instruction. Truth is 0 or 1."""

SWAPPED = {"gt": "less", "ge": "less or equal"}
"""Comparisons that are made with the operands exchanged."""

MOST_FACTORS = 4
"""The highest whole power that is computed by multiplications."""


def read_equation(step: RowStep, eqn: JaxprEqn) -> None:
    """Add the instructions of an equation to a step. `NotByRowsError` says that there are none."""
    name = eqn.primitive.name
    if eqn.effects or any(get_dtype(variable) not in ("float32", "bool") for variable in eqn.outvars):
        raise NotByRowsError(f"{name} has effects, or results of another dtype")
    if any(get_shape(variable)[:1] != (step.rows,) for variable in eqn.outvars):
        raise NotByRowsError(f"the results of {name} have no rows")
    if name == "split":
        split_rows(step, eqn)
    elif name in READERS:
        step.keep(eqn.outvars[0], READERS[name](step, eqn))
    else:
        raise NotByRowsError(f"there is no instruction for {name}")


def compute_elements(step: RowStep, eqn: JaxprEqn) -> Value:
    """Translate an elementwise equation. The result has one element a row if the operands have no more."""
    name = eqn.primitive.name
    shape = get_shape(eqn.outvars[0])
    operands = [step.read(atom, shape) for atom in eqn.invars]
    width = max(operand.width for operand in operands)
    if name in OPERATIONS:
        return step.make(OPERATIONS[name], width, *operands)
    if name in SWAPPED:
        return step.make(SWAPPED[name], width, *operands[::-1])
    if name == "clamp":
        low, x, high = operands
        return step.make("smaller", width, step.make("larger", width, x, low), high)
    if name == "select_n":
        if len(operands) != 3 or get_dtype(eqn.invars[0]) != "bool":
            raise NotByRowsError("select_n chooses among more than two")
        condition, otherwise, value = operands
        return step.make("select", width, condition, value, otherwise)
    (x,) = operands
    if name == "not":
        return step.make("subtract", width, step.read_number(1.0), x)
    if name == "one_minus_square":  # in the form in which JAX gives it to XLA
        one = step.read_number(1.0)
        return step.make("multiply", width, step.make("add", width, x, one), step.make("subtract", width, one, x))
    if name == "rsqrt":
        return step.make("divide", width, step.read_number(1.0), step.make("square root", width, x))
    power = 2 if name == "square" else eqn.params["y"]
    if not 1 <= power <= MOST_FACTORS:
        raise NotByRowsError(f"there is no instruction for the power {power}")
    value = x
    for _ in range(power - 1):
        value = step.make("multiply", width, value, x)
    return value


def multiply_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    """Translate the matmul of rows with a matrix that never changes."""
    left, right = eqn.invars
    contracted, batch = eqn.params["dimension_numbers"]
    is_of_rows = not isinstance(left, Var) or left not in step.constants
    is_by_matrix = isinstance(right, Var) and right in step.constants and get_dtype(right) == "float32"
    has_batch = any(map(len, batch))
    if not is_of_rows or not is_by_matrix or has_batch or (len(get_shape(left)), len(get_shape(right))) != (2, 2):
        raise NotByRowsError("a product is none of rows with a matrix")
    if tuple(contracted[0]) != (1,):
        raise NotByRowsError("rows meet in a product")
    assert isinstance(right, Var)
    is_transposed = tuple(contracted[1]) == (1,)
    x = step.read(left)
    depth = measure_row(left)
    x = x if x.width == depth else step.make("copy", depth, x)
    return step.make("product", get_shape(right)[not is_transposed], x, step.read_matrix(right, is_transposed))


def split_rows(step: RowStep, eqn: JaxprEqn) -> None:
    if eqn.params["axis"] != 1:
        raise NotByRowsError("a split is along another dimension than the first of a row")
    start = 0
    for result in eqn.outvars:
        step.keep(result, take_part(step, eqn.invars[0], start, result))
        start += get_shape(result)[1]


def cut_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    shape = get_shape(eqn.outvars[0])
    whole = get_shape(eqn.invars[0])
    strides = set(eqn.params["strides"] or [1])
    if len(shape) < 2 or shape[0] != whole[0] or shape[2:] != whole[2:] or strides != {1}:
        raise NotByRowsError("a slice is along another dimension than the first of a row")
    return take_part(step, eqn.invars[0], eqn.params["start_indices"][1], eqn.outvars[0])


def take_part(step: RowStep, operand: Atom, start: int, result: Var) -> Value:
    """Slice an operand along the first dimension of a row."""
    value = step.read(operand)
    if value.width != measure_row(operand):  # the same number everywhere
        return value
    return value._replace(width=measure_row(result), offset=value.offset + start * math.prod(get_shape(result)[2:]))


def concatenate_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    if eqn.params["dimension"] != 1:
        raise NotByRowsError("parts are joined along another dimension than the first of a row")
    return step.join([(step.read(atom), measure_row(atom)) for atom in eqn.invars])


def pad_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    operand, filling = eqn.invars
    of_rows, *of_row = eqn.params["padding_config"]
    first, *others = of_row or [(0, 0, 0)]
    before, after, between = map(int, first)
    if any(map(any, [of_rows, *others])) or min(before, after) < 0 or between:
        raise NotByRowsError("padding is along another dimension than the first of a row")
    inner = math.prod(get_shape(operand)[2:])
    filler = step.read(filling)
    return step.join([(filler, before * inner), (step.read(operand), measure_row(operand)), (filler, after * inner)])


def broadcast_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    if get_shape(eqn.invars[0]) == ():
        return step.read(eqn.invars[0])
    if eqn.params["broadcast_dimensions"][0] != 0:
        raise NotByRowsError("rows become another dimension")
    return reshape_rows(step, eqn)


def reshape_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    """Pass an operand on if only the shape of its rows changes. An equation may also repeat the one element of a row."""
    name = eqn.primitive.name
    operand = eqn.invars[0]
    value = step.read(operand)
    is_as_long = measure_row(operand) == measure_row(eqn.outvars[0])
    is_reduced = name.startswith("reduce_") and not is_as_long
    is_reordered = name == "reshape" and eqn.params["dimensions"] is not None
    if get_shape(operand)[:1] != (step.rows,) or is_reordered or is_reduced or not (is_as_long or value.width == 1):
        raise NotByRowsError(f"{name} is more than another shape of the same rows")
    return value


def convert_rows(step: RowStep, eqn: JaxprEqn) -> Value:
    before = get_dtype(eqn.invars[0])
    after = get_dtype(eqn.outvars[0])
    if before not in ("float32", "bool"):
        raise NotByRowsError(f"{before} is converted")
    value = step.read(eqn.invars[0])
    is_test = after == "bool" and before != "bool"
    return step.make("unequal", value.width, value, step.read_number(0.0)) if is_test else value


ELEMENTWISE = (*OPERATIONS, *SWAPPED, "clamp", "integer_pow", "not", "one_minus_square", "rsqrt", "select_n", "square")
RESHAPES = (
    "copy", "copy_p", "reshape", "squeeze", "stop_gradient",
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",  # over dimensions of size 1
)  # fmt: skip

READERS: Mapping[str, Callable[[RowStep, JaxprEqn], Value]] = {
    **dict.fromkeys(ELEMENTWISE, compute_elements),
    **dict.fromkeys(RESHAPES, reshape_rows),
    "broadcast_in_dim": broadcast_rows,
    "concatenate": concatenate_rows,
    "convert_element_type": convert_rows,
    "dot_general": multiply_rows,
    "pad": pad_rows,
    "slice": cut_rows,
}
"""What reads an equation with one result, by the primitive's name."""
