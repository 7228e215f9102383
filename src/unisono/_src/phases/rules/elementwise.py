"""Operations on each element: rows stay where they are."""

from __future__ import annotations

from unisono._src.phases.kinds import Outcomes
from unisono._src.phases.rules.rule import Layouts, Rule, find_common, keep
from unisono._src.phases.twins import Equation


def keep_rows(equation: Equation, layouts: Layouts) -> Outcomes:
    return keep(equation, find_common(layouts))


def keep_rows_of_words(equation: Equation, layouts: Layouts) -> Outcomes:
    """Keep rows between dtypes of one width. Others add or take an axis at the end, and the rows stay."""
    return keep_rows(equation, layouts)


NAMES = [
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "complex",
    "conj",
    "convert_element_type",
    "copy",
    "copy_p",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "eq_to",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "le_to",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "lt",
    "lt_to",
    "max",
    "min",
    "mul",
    "mulhi",
    "name",
    "ne",
    "neg",
    "nextafter",
    "not",
    "optimization_barrier",
    "or",
    "polygamma",
    "population_count",
    "pow",
    "pvary",
    "random_gamma_grad",
    "real",
    "reduce_precision",
    "regularized_incomplete_beta",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "xor",
    "zeta",
    "bessel_i0e",
    "bessel_i1e",
]

RULES: dict[str, Rule] = dict.fromkeys(NAMES, keep_rows) | {"bitcast_convert_type": keep_rows_of_words}
