"""A process of its own: runs native kernels on random shapes, for sanitizers that watch it. What they return, `tests/kernels/native` compares.

python call_kernels.py FOLDER SEED COUNT: the kernels are those of the library in FOLDER, and there are so many cases of each kind in
`KINDS`. What is drawn depends on the seed alone. Prints the build of the library and the names of the kernels that were called, as JSON.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from keras import layers

from digest_operations import Draw
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.engine.packing import LENGTH_MULTIPLE
from unisono._src.engine.step.running_sums import count_places
from unisono._src.kernels.before_gradient import rewrite_before_gradient
from unisono._src.kernels.native import library
from unisono._src.kernels.native.column_sums import add_up_columns, add_up_gated_columns, measure_columns
from unisono._src.kernels.native.convolutions import (
    call_convolution,
    call_convolution_with_bias,
    call_depthwise,
    call_depthwise_kernel_gradient,
    call_kernel_gradient,
)
from unisono._src.kernels.native.normalizations import normalize_rows
from unisono._src.kernels.native.products import call_gated_product, call_product, call_product_with_bias, call_transposed_product
from unisono._src.kernels.native.step_calls import (
    call_all_reduce,
    call_come_after,
    call_digest,
    call_push,
    call_put_together,
    copy_rows,
    keep_array,
    keep_cut_array,
    make_group,
    open_step_memory,
)
from unisono._src.kernels.rewriting import rewrite_function
from unisono._src.programs.inlining import inline_calls


class Case(NamedTuple):
    """A call of a kernel."""

    what: str
    call: Callable[..., Any]
    args: list[jax.Array]


def transposed_product(draw: Draw) -> Case:
    """Small ones, and some whose rows, columns or sums are cut in pieces."""
    most = list(draw.of((100, 100, 100), (300, 300, 300), (8, 3000, 700), (6000, 30, 60)))
    draw.random.shuffle(most)
    rows, depth, columns = (draw.size(draw.of(1, n // 3), n) for n in most)
    return Case(
        f"the transposed product of {(rows, depth)} and {(rows, columns)}",
        lambda x, y: call_transposed_product([x], y),
        [draw.array((rows, depth), "float32"), draw.array((rows, columns), "float32")],
    )


def transposed_products(draw: Draw) -> Case:
    """Of several matrices with one, and the sum of its rows."""
    rows, columns = draw.size(1, draw.of(300, 3000)), draw.size(1, draw.of(60, 600))
    depths = [draw.size(1, draw.of(40, 600)) for _ in range(draw.size(1, 4))]
    return Case(
        f"the transposed products of {rows} rows of {depths} and {columns}, and a sum",
        lambda right, *lefts: call_transposed_product(lefts, right, True),
        [draw.array((rows, size), "float32") for size in (columns, *depths)],
    )


def gated_product(draw: Draw) -> Case:
    what, left, right = draw_matrices(draw)
    return Case(
        f"{what}, where an array is positive",
        lambda x, y, gate: call_gated_product(x, y.T, gate, True),
        [left, right, draw.array((left.shape[0], right.shape[1]), "float32")],
    )


def draw_matrices(draw: Draw) -> tuple[str, jax.Array, jax.Array]:
    rows, depth, columns = (draw.size(1, most) for most in draw.of((100, 100, 100), (300, 600, 70), (30, 1100, 300)))
    return (
        f"the product of {(rows, depth)} and {(depth, columns)}",
        draw.array((rows, depth), "float32"),
        draw.array((depth, columns), "float32"),
    )


def product(draw: Draw) -> Case:
    """With the right matrix as it is, or transposed."""
    what, left, right = draw_matrices(draw)
    if draw.of(False, True):
        return Case(f"{what}, transposed", lambda x, y: call_product(x, y, True), [left, right.T])
    return Case(what, call_product, [left, right])


def product_with_bias(draw: Draw) -> Case:
    what, left, right = draw_matrices(draw)
    return Case(
        f"{what}, with a bias and a rectifier",
        lambda x, y, bias: call_product_with_bias(x, y, bias, True),
        [left, right, draw.array(right.shape[1:], "float32")],
    )


class Convolution(NamedTuple):
    """The sizes of a convolution over two dimensions."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """Pixels of the output; none or fewer where the kernel does not fit."""
        reach = [(taps - 1) * gap + 1 for taps, gap in zip(self.w, self.dilation, strict=False)]
        sizes = zip(self.x[1:3], self.padding, reach, self.strides, strict=True)
        return tuple((n + low + high - taps) // stride + 1 for n, (low, high), taps, stride in sizes)

    @property
    def is_possible(self) -> bool:
        """Return whether pixels are left of the input and of the output."""
        left = [n + min(low, 0) + min(high, 0) for n, (low, high) in zip(self.x[1:3], self.padding, strict=True)]
        return min(*left, *self.results) > 0

    def forward(self, draw: Draw) -> Case:
        before = [low for low, _ in self.padding]
        is_reversed = draw.of(False, True)

        kept = (*self.w[:2], *self.w[:1:-1]) if is_reversed else self.w
        return Case(
            f"the convolution {self}{' with a reversed kernel' if is_reversed else ''}",
            lambda x, w: call_convolution(x, w, self.results, self.strides, before, self.dilation, is_reversed),
            [draw.array(self.x, "float32"), draw.array(kept, "float32")],
        )

    def forward_with_bias(self, draw: Draw) -> Case:
        before = [low for low, _ in self.padding]
        is_rectified = draw.of(False, True)

        return Case(
            f"the {'rectified ' if is_rectified else ''}convolution {self} with a bias",
            lambda x, w, bias: call_convolution_with_bias(
                x, w, bias, self.results, self.strides, before, self.dilation, is_rectified
            ),
            [draw.array(self.x, "float32"), draw.array(self.w, "float32"), draw.array(self.w[3:], "float32")],
        )

    def backward(self, draw: Draw) -> Case:
        before = [low for low, _ in self.padding]
        return Case(
            f"the gradient by the kernel of {self}",
            lambda x, gradient: call_kernel_gradient(x, gradient, self.w[:2], self.strides, before, self.dilation),
            [draw.array(self.x, "float32"), draw.array((self.x[0], *self.results, self.w[3]), "float32")],
        )


def draw_convolution(draw: Draw) -> Convolution:
    """All kernels, strides, paddings and dilations: what the kernel for products computes, and now and then Winograd's algorithm."""
    while True:
        taps, strides, dilation = ([draw.of(*few), draw.of(*few)] for few in ((1, 2, 3, 3, 4, 5, 7), (1, 1, 2, 3), (1, 1, 2)))
        found = Convolution(
            (draw.size(1, 6), draw.size(1, 20), draw.size(1, 20), ins := draw.size(1, 70)),
            (*taps, ins, draw.size(1, 70)),
            tuple(strides),
            tuple((draw.of(-1, 0, 1, 1, 2, 3), draw.of(-1, 0, 1, 1, 2, 3)) for _ in range(2)),
            tuple(dilation),
        )
        if found.is_possible:
            return found


def draw_for_winograd(draw: Draw) -> Convolution:
    """What `is_for_winograd` in `native/winograd.cc` takes."""
    while True:
        ins, outs = draw.of(32, 48, 80, 128), draw.of(32, 48, 80, 128)
        found = Convolution(
            (draw.size(1, 9), draw.size(2, 30), draw.size(2, 30), ins),
            (3, 3, ins, outs),
            (1, 1),
            tuple((draw.of(-1, 0, 1, 1, 2), draw.of(-1, 0, 1, 1, 2)) for _ in range(2)),
            (1, 1),
        )
        if found.is_possible and 64 <= found.x[0] * math.prod(-(-n // 2) for n in found.results) <= 600:
            return found


def draw_depthwise(draw: Draw) -> Convolution:
    convolution, features = draw_convolution(draw), draw.size(1, 150)
    return convolution._replace(x=(*convolution.x[:3], features), w=(*convolution.w[:2], 1, features))


def depthwise(draw: Draw) -> Case:
    convolution = draw_depthwise(draw)
    results, strides, padding, dilation = convolution.results, convolution.strides, convolution.padding, convolution.dilation
    before = [low for low, _ in padding]
    return Case(
        f"the depthwise convolution {convolution}",
        lambda x, w: call_depthwise(x, w, results, strides, before, dilation, (1, 1)),
        [draw.array(convolution.x, "float32"), draw.array((*convolution.w[:2], convolution.w[3]), "float32")],
    )


def depthwise_gradient(draw: Draw) -> Case:
    convolution = draw_depthwise(draw)
    taps, before = convolution.w[:2], [low for low, _ in convolution.padding]
    return Case(
        f"the gradient by the kernel of the depthwise convolution {convolution}",
        lambda x, dy: call_depthwise_kernel_gradient(x, dy, taps, convolution.strides, before, convolution.dilation),
        [draw.array(shape, "float32") for shape in (convolution.x, (convolution.x[0], *convolution.results, convolution.w[3]))],
    )


def convolution(draw: Draw, form: str) -> Case:
    return getattr(draw_convolution(draw), form)(draw)


def winograd(draw: Draw, form: str) -> Case:
    """Every other time with an infinity in what is convolved: such outputs are computed another way."""
    case = getattr(draw_for_winograd(draw), form)(draw)
    if draw.of(True, False):
        return case
    x, *others = case.args
    place = tuple(draw.random.integers(0, x.shape))
    return case._replace(what=f"{case.what} with an infinity at {place}", args=[x.at[place].set(jnp.inf), *others])


def row_loop(draw: Draw) -> Case:
    """Of a recurrent layer: the loop forward, or the one of its gradients."""
    make = draw.of(layers.LSTM, layers.GRU, layers.SimpleRNN)
    kind = make.__name__
    options: dict[str, Any] = {
        "units": draw.size(1, 70),
        "activation": draw.of("tanh", "relu", "silu"),
        "return_sequences": draw.of(True, False),
        "go_backwards": draw.of(True, False),
    }
    options |= {"recurrent_activation": draw.of("sigmoid", "hard_sigmoid")} if kind != "SimpleRNN" else {}
    options |= {"reset_after": draw.of(True, False)} if kind == "GRU" else {}
    layer = make(**options)
    rows, steps, features = shape = draw.size(1, 50), draw.size(2, 9), draw.size(1, 20)
    layer.build((None, steps, features))
    mask = jnp.asarray(draw.random.random((rows, steps)) < 0.7) if draw.of(True, False) else None
    weights, others = ([of.value for of in group] for group in (layer.trainable_variables, layer.non_trainable_variables))

    def loss(weights: list[Any], x: Any) -> Any:
        return (layer.stateless_call(weights, others, x, mask=mask)[0] ** 2).sum()

    program = inline_calls(jax.make_jaxpr(jax.grad(loss, (0, 1)))(weights, jnp.zeros(shape)))
    loops = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 2, f"{kind} has {len(loops)} loops"
    is_gradient = draw.of(False, True)
    equation = loops[is_gradient]

    def run(*args: Any) -> Any:
        return equation.primitive.bind(*args, **equation.params)

    return Case(
        f"the {'gradient' if is_gradient else 'loop'} of {kind} with {options} for {shape}",
        rewrite_function(run, "cpu"),
        [draw_value(draw, atom.aval) for atom in equation.invars],
    )


def attention(draw: Draw, is_gradient: bool = False) -> Case:
    """Forward, or its gradient."""
    batch, heads, queries, keys = draw.size(1, 3), draw.size(1, 5), draw.size(8, 150), draw.size(8, 300)
    depth, width = draw.size(2, 70), draw.size(2, 70)
    sizes = {"b": batch, "h": heads, "q": queries, "k": keys}
    shapes = [tuple(sizes[name] if draw.of(True, False) else 1 for name in sizes) for _ in range(4)]
    bias, *masks = draw.array(shapes[0], "float32"), *(draw.array(shape, "float32") > -1 for shape in shapes[1:])
    is_masked, is_biased, is_dropped = (draw.of(True, False) for _ in range(3))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = q @ k.swapaxes(-1, -2) / 8
        scores = scores + bias if is_biased else scores
        scores = jnp.where(masks[0] & masks[1], scores, -1e9) if is_masked else scores
        weights = jax.nn.softmax(scores)
        return (jnp.where(masks[2], weights / 0.9, 0) if is_dropped else weights) @ v

    def differentiate(function: Callable[..., jax.Array], *args: jax.Array) -> Any:
        *rows, by_result = args
        return jax.grad(rewrite_before_gradient(lambda *rows: (function(*rows) * by_result).sum()), (0, 1, 2))(*rows)

    lengths = (queries, depth), (keys, depth), (keys, width), (queries, width)
    args = [draw.array((batch, heads, *length), "float32") for length in lengths]
    run = functools.partial(differentiate, attend) if is_gradient else lambda *args: attend(*args[:3])
    what = f"the {'gradient of ' * is_gradient}attention of {args[0].shape} to {args[2].shape} with {shapes}, {is_masked, is_biased, is_dropped}"
    return Case(what, rewrite_function(run, "cpu"), args)


def normalization(draw: Draw, is_gradient: bool = False) -> Case:
    shape = (*draw.shape(draw.size(1, 2), draw.of(40, 3000)), draw.size(3, draw.of(40, 700)))

    def normalize(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        return normalize_rows(x, scale, offset, 1e-3)

    args = [draw.array(size, "float32") for size in (shape, shape[-1:], shape[-1:])]
    if not is_gradient:
        return Case(f"the normalization of {shape}", normalize, args)
    return Case(
        f"the gradient of the normalization of {shape}",
        lambda *args: jax.vjp(normalize, *args[:-1])[1](args[-1]),
        [*args, draw.array(shape, "float32")],
    )


def moments_of_columns(draw: Draw) -> Case:
    """Also of rows that are cut in pieces, and of columns that are no whole vectors."""
    shape = (*draw.shape(draw.size(1, 3), draw.of(40, 30000)), draw.size(1, draw.of(40, 700)))
    return Case(f"the moments of the columns of {shape}", lambda x: measure_columns(x)[:2], [draw.array(shape, "float32")])


def sums_of_columns(draw: Draw) -> Case:
    shape = (*draw.shape(draw.size(1, 3), draw.of(40, 30000)), draw.size(1, draw.of(40, 700)))
    return Case(
        f"the sums of the columns of {shape}, and of their products",
        add_up_columns,
        [draw.array(shape, "float32") for _ in range(2)],
    )


def gated_sums_of_columns(draw: Draw) -> Case:
    shape = (*draw.shape(draw.size(1, 3), draw.of(40, 30000)), draw.size(1, draw.of(40, 700)))
    low, high = draw.of((0.0, None), (0.0, 1.0))

    def add_up(values: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return add_up_gated_columns(values, x, jnp.ones(shape[-1]), jnp.zeros(shape[-1]), low, high)

    return Case(f"the gated sums of the columns of {shape}", add_up, [draw.array(shape, "float32") for _ in range(2)])


def contribution(draw: Draw) -> Case:
    """One more contribution to the sums of a reduction tree."""
    arrays = [draw.array(draw.shape(draw.size(1, 3), draw.of(40, 50_000)), "float32") for _ in range(draw.size(1, 9))]
    number = draw.size(1, 100) - 1
    length = -(-sum(array.size for array in arrays) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    sums = draw.array((count_places(number + 1), length), "float32")
    return Case(
        f"a contribution of {[array.shape for array in arrays]} after {number}",
        lambda sums, before, *arrays: call_push(sums + 0, before, arrays),
        [sums, jnp.int32(number), *arrays],
    )


def digest(draw: Draw) -> Case:
    """Of parts of arrays."""
    arrays = [
        draw.array(draw.shape(draw.size(1, 3), draw.of(40, 50_000)), draw.of("float32", "float16"))
        for _ in range(draw.size(1, 5))
    ]
    parts = []
    for place, array in enumerate(arrays):
        first = draw.size(1, array.size) - 1
        parts.append((place, first, draw.size(1, array.size - first)))

    return Case(
        f"the digests of {parts} of {[array.shape for array in arrays]}", lambda *arrays: call_digest(arrays, parts), arrays
    )


def draw_value(draw: Draw, aval: Any) -> jax.Array:
    if aval.dtype == "bool":
        return jnp.asarray(draw.random.random(aval.shape) < 0.7)
    return draw.array(aval.shape, str(aval.dtype)) * 0.5


def kept_array(draw: Draw) -> Case:
    """An array that the program goes on with, and one that it reads again."""
    is_read_again = draw.of(False, True)

    def run(x: jax.Array) -> jax.Array:
        doubled = x * 2
        return keep_array(doubled).reshape(-1) + (doubled.reshape(-1) if is_read_again else 0)

    shape = draw.shape(draw.size(1, 4), 5000)
    return Case(f"an array of {shape} that is kept", run, [draw.array(shape, "float32")])


def step_memory(draw: Draw) -> Case:
    """Numbers whose copy lies in memory that is small or large."""
    count = draw.size(1, 40)
    size = draw.of(1, 1 << 20, 1 << 24)

    def add_ends(numbers: jax.Array) -> jax.Array:
        many = lax.optimization_barrier(jnp.zeros(size, jnp.int32) + numbers[0])
        return lax.optimization_barrier(jnp.flip(many) + numbers[-1])[:3]

    return Case(
        f"the memory of a step, by {count} numbers",
        lambda numbers: add_ends(open_step_memory(numbers)),
        [draw.array((count,), "int32")],
    )


def sums_over_devices(draw: Draw) -> Case:
    """The first places of two devices' sums."""
    mesh, group = get_mesh(tuple(jax.devices()[:2])), make_group(2, [(0, 1)])
    places, length = draw.size(1, 3), draw.size(1, draw.of(300, 40_000))

    def add_on_device(sums: jax.Array, numbers: jax.Array) -> jax.Array:
        return call_all_reduce(numbers[0], [sums])[0][:1]

    def add(sums: jax.Array) -> jax.Array:
        numbers = jnp.array([[group, device, 0] for device in (0, 1)], jnp.int32)
        return mesh.map_blocks(add_on_device, cut=True, cut_results=True)(sums, numbers)

    return Case(f"sums of {length} elements over two devices", add, [draw.array((2 * places, length), "float32")])


def cut_array(draw: Draw) -> Case:
    """An array that is put together from parts of several blocks."""
    count, blocks, length = draw.size(1, 4), draw.size(1, 5), draw.size(1, draw.of(300, 600_000))
    parts = jax.block_until_ready([draw.array((blocks, length), "float32") for _ in range(count)])
    number = keep_cut_array([part.unsafe_buffer_pointer() for part in parts], blocks, 4 * length)
    like = jax.ShapeDtypeStruct((blocks, count * length), np.float32)

    def put_together(number: jax.Array, *parts: jax.Array) -> jax.Array:
        return call_come_after(call_put_together(number, like, parts), parts[:1])

    return Case(f"an array of {count} parts, {blocks} blocks of {length} each", put_together, [jnp.array([number, 0, 0]), *parts])


FORMS = ("forward", "forward_with_bias", "backward")
KINDS = (
    *(functools.partial(kind, form=form) for kind in (convolution, winograd) for form in FORMS),
    *(transposed_product, transposed_products, product, product_with_bias, gated_product),
    *(depthwise, depthwise_gradient, row_loop),
    *(attention, functools.partial(attention, is_gradient=True)),
    *(normalization, functools.partial(normalization, is_gradient=True)),
    *(moments_of_columns, sums_of_columns, gated_sums_of_columns),
    *(contribution, digest, step_memory, kept_array, sums_over_devices, cut_array),
)
"""Each draws a case in which a kernel reads arguments of the program and writes its results: such arrays have memory of their own, and a
sanitizer sees an access beyond it."""


def run(case: Case) -> set[str]:
    """Run a case, and return the kernels that were called."""
    program = jax.jit(case.call).lower(*case.args)
    called = set(re.findall(r"@(unisono_\w+)", program.as_text()))
    assert called, f"{case.what} is left to XLA"
    jax.block_until_ready(program.compile()(*case.args))
    return called


def copy_chosen_rows(draw: Draw) -> None:
    """Copy rows of an array on the host, to memory that begins anywhere."""
    rows, columns, count = draw.size(1, 50), draw.size(1, 300), draw.size(1, 40)
    array = np.asarray(draw.array((rows, columns), draw.of("float32", "float16")))
    chosen = draw.random.integers(0, rows, count)
    target = np.empty(count * columns + draw.size(1, 40), array.dtype)[-count * columns :].reshape(count, columns)
    assert copy_rows(array, chosen, target)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    folder, *words = sys.argv[1:]
    seed, count = map(int, words)
    library.FOLDER = pathlib.Path(folder)
    kernels = library.load_kernels()
    if kernels.level is None:
        sys.exit(str(kernels))
    called: set[str] = set()
    for place, kind in enumerate(KINDS):
        for number in range(count):
            case = kind(Draw(seed, place, number))
            try:
                called |= run(case)
            except Exception as error:
                error.add_note(f"This was {case.what}.")
                raise
    for number in range(count):
        copy_chosen_rows(Draw(seed, len(KINDS), number))
    print(json.dumps({"build": kernels.build, "kernels": sorted(called)}))


if __name__ == "__main__":
    main()
