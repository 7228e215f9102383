"""Fuse a bias and a ReLU into the kernel before them.

That kernel computes a convolution or a matmul. A ReLU's gradient is fused as well. The result then passes through memory once,
not two or three times. The kernel adds the bias to a finished sum, so that the bits are the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from unisono._src.kernels.convolution.kernel import convolve_with_features_last
from unisono._src.kernels.convolution.native_convolution import (
    add_dimension,
    find_reversed_kernel,
    has_native_kernel,
    is_kernel_gradient,
)
from unisono._src.kernels.convolution.pieces import ConvolutionSizes
from unisono._src.kernels.convolution.window import Window, has_phases
from unisono._src.kernels.native.convolutions import call_convolution_with_bias
from unisono._src.kernels.products.native_product import compute_gated_product, compute_product_with_bias, is_for_product_kernel
from unisono._src.programs.equations import NESTED, Params, Producers, Replacement
from unisono._src.programs.operands import Atom, get_dtype, get_shape
from unisono._src.programs.private.jaxprs import close_program

CALLS = ("jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
"""Primitives that run a function once, on their operands."""

FLOATS = ("float32", "bfloat16", "float16", "float64")


class BiasedResult(NamedTuple):
    """A convolution or a matmul, and the bias added to it."""

    eqn: JaxprEqn
    bias: Atom

    def replace(self, is_rectified: bool) -> Replacement:
        """Build one kernel call for the equation, the sum and the ReLU."""
        if self.eqn.primitive.name == "dot_general":
            (contracted, _), _ = self.eqn.params["dimension_numbers"]
            compute = functools.partial(compute_product_with_bias, len(contracted), is_rectified)
        else:
            compute = functools.partial(convolve_with_bias, self.eqn.params, is_rectified)
        return Replacement(compute, (*self.eqn.invars, self.bias))


def replace_biased_sum(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace a convolution or a matmul plus a bias. Nothing else may read the result without the bias."""
    biased = find_biased_result(eqn, made_by)
    return None if biased is None else biased.replace(is_rectified=False)


def replace_rectifier(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace the ReLU of such a sum. Nothing else may read the sum."""
    maker = made_by.find_if_read_once(eqn.invars[0]) if is_rectifier(eqn) else None
    biased = None if maker is None or maker.primitive.name != "add" else find_biased_result(maker, made_by)
    return None if biased is None else biased.replace(is_rectified=True)


def replace_gated_product(eqn: JaxprEqn, made_by: Producers) -> Replacement | None:
    """Replace the gradient of a ReLU after a matmul.

    It selects the matmul, which nothing else reads, where an array is positive, and zeros elsewhere.
    """
    which, *cases = eqn.invars
    maker = made_by.find_if_read_once(cases[-1])
    if maker is None or maker.primitive.name != "dot_general" or len(cases) != 2 or not is_broadcast_zero(cases[0], made_by):
        return None
    comparison = made_by.find(which)
    if comparison is None or comparison.primitive.name != "gt" or not is_positive_zero(comparison.invars[1]):
        return None
    gate = comparison.invars[0]
    if {get_dtype(atom) for atom in [*maker.invars, *eqn.outvars, gate]} != {"float32"} or get_shape(gate) != get_shape(cases[1]):
        return None
    is_transposed = find_product_kernel(maker)
    if is_transposed is None:
        return None
    (contracted, _), _ = maker.params["dimension_numbers"]
    return Replacement(functools.partial(compute_gated_product, len(contracted), is_transposed), (*maker.invars, gate))


def convolve_with_bias(params: Params, is_rectified: bool, x: Array, w: Array, bias: Array) -> Array:
    """Convolve in one or two dimensions of space, and add a bias."""

    def convolve(x: Array, w: Array, window: Window) -> Array:
        results = window.results(x.shape[1:-1], w.shape[:-2])
        before = [low for low, _ in window.padding]
        return call_convolution_with_bias(x, w, bias.reshape(-1), results, window.strides, before, window.dilation, is_rectified)

    return convolve_with_features_last(functools.partial(add_dimension, convolve), x, w, params)


def find_biased_result(eqn: JaxprEqn, made_by: Producers) -> BiasedResult | None:
    """Find the convolution or matmul, and the bias, in a sum. None if an equation adds something else."""
    for summand, other in (eqn.invars, eqn.invars[::-1]):
        maker = made_by.find_if_read_once(summand)
        features = () if maker is None else find_features(maker, made_by)
        if maker is not None and features:
            bias = find_bias(other, get_shape(summand), features, made_by)
            if bias is not None:
                return BiasedResult(maker, bias)
    return None


def find_features(eqn: JaxprEqn, made_by: Producers) -> tuple[int, ...]:
    """The dimensions of a result that a bias has. Empty if no kernel adds a bias to it."""
    if {get_dtype(atom) for atom in [*eqn.invars, *eqn.outvars]} != {"float32"}:
        return ()
    if eqn.primitive.name == "dot_general":
        return find_columns(eqn)
    if eqn.primitive.name == "conv_general_dilated" and is_plain_convolution(eqn, made_by):
        return (eqn.params["dimension_numbers"].out_spec[1],)
    return ()


def find_columns(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dimensions that a matmul has from its right operand. Empty if the native kernel cannot add a bias to it."""
    if find_product_kernel(eqn) is not False:
        return ()
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, right = map(get_shape, eqn.invars)
    first = len(left) - len(contracted)
    return tuple(range(first, first + len(right) - len(contracted)))


def find_product_kernel(eqn: JaxprEqn) -> bool | None:
    """Whether the native kernel would read the right operand transposed. None if the kernel does not compute this matmul."""
    (contracted, right_contracted), (batch, _) = eqn.params["dimension_numbers"]
    left, right = map(get_shape, eqn.invars)
    if batch or eqn.params["out_sharding"] is not None:
        return None
    axes = tuple(contracted), tuple(right_contracted)
    return next((form for form in (False, True) if is_for_product_kernel((left, right), axes, is_transposed=form)), None)


def is_plain_convolution(eqn: JaxprEqn, made_by: Producers) -> bool:
    """Whether a convolution is one kernel call, without a reversed kernel."""
    if not 1 <= len(eqn.params["window_strides"]) <= 2 or is_kernel_gradient(eqn.params) or has_phases(Window.of(eqn.params)):
        return False
    if find_reversed_kernel(eqn.params, eqn.invars[1], made_by) is not None:
        return False
    x, w = map(get_shape, eqn.invars)
    return has_native_kernel(eqn, ConvolutionSizes.from_shapes(x, w, eqn.params))


def find_bias(atom: Atom, shape: tuple[int, ...], features: tuple[int, ...], made_by: Producers) -> Atom | None:
    """Find an added array that has one number for each feature alone."""
    if isinstance(atom, Literal):
        return None
    maker = made_by.find(atom)
    if maker is not None and maker.primitive.name == "broadcast_in_dim" and get_shape(atom) == shape:
        atom = maker.invars[0]
        axes = maker.params["broadcast_dimensions"]
    else:
        axes = tuple(range(len(shape)))
    sizes = [shape[axis] if axis in features else 1 for axis in axes]
    return atom if set(features) <= set(axes) and list(get_shape(atom)) == sizes else None


def is_rectifier(eqn: JaxprEqn) -> bool:
    """Whether an equation is a ReLU: `max(operand, 0)`. It may also call a function that does this alone."""
    if len(eqn.outvars) != 1 or get_dtype(eqn.outvars[0]) not in FLOATS:
        return False
    if eqn.primitive.name == "max":
        return is_positive_zero(eqn.invars[1])
    if eqn.primitive.name not in CALLS or len(eqn.invars) != 1:
        return False
    (name,) = NESTED[eqn.primitive.name]
    inner = close_program(eqn.params[name]).jaxpr
    is_whole = len(inner.eqns) == 1 and inner.outvars == inner.eqns[0].outvars and inner.eqns[0].invars[:1] == inner.invars
    return is_whole and is_rectifier(inner.eqns[0])


def is_broadcast_zero(atom: Atom, made_by: Producers) -> bool:
    """Whether every element of an array is the number 0.0."""
    maker = made_by.find(atom)
    return maker is not None and maker.primitive.name == "broadcast_in_dim" and is_positive_zero(maker.invars[0])


def is_positive_zero(atom: Atom) -> bool:
    """Whether an operand is the number 0.0, and not -0.0. A ReLU would return -0.0."""
    return isinstance(atom, Literal) and not get_shape(atom) and atom.val == 0 and not np.signbit(atom.val)


def compare_rectified(program: Jaxpr) -> Jaxpr:
    """Make a ReLU's gradient compare its result with zero, not its operand.

    Both are positive at the same places. The operand then need not be kept.
    """
    rectified: dict[Atom, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in program.eqns:
        operand = eqn.invars[0] if eqn.invars else None
        if isinstance(operand, Var):  # a Literal has no hash
            if eqn.primitive.name == "gt" and operand in rectified and is_positive_zero(eqn.invars[1]):
                eqn = eqn.replace(invars=[rectified[operand], eqn.invars[1]])
            elif is_rectifier(eqn):
                rectified[operand] = eqn.outvars[0]
        eqns.append(eqn)
    return program.replace(eqns=eqns) if rectified else program
