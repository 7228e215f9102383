"""Operations that are measured alone: those of the workloads, in float32."""

from __future__ import annotations

from typing import NamedTuple

LINEAR = ("forward", "by the input", "by the kernel")
WHOLE = ("forward", "forward and gradients")


class Case(NamedTuple):
    """One operation.

    Args:
        kind: "convolution", "product", "LSTM", "GRU", "attention", "normalization" or "batch normalization".
        x: The shape of its input; of attention, that of queries, keys and values: (rows, places, heads, width).
        kernel: The shape of its kernel; of a recurrent layer, its features.
        flops: Products and sums of a forward pass.
        parts: What of it is measured. The gradient by the input of a net's first layer is asked for by nobody.
    """

    kind: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    flops: float
    parts: tuple[str, ...] = LINEAR
    stride: int = 1

    def flops_of(self, part: str) -> float:
        """Return the operations of a part: a gradient has as many as the forward pass, and what is computed twice counts once."""
        return self.flops * (3 if part == WHOLE[1] else 1)

    def together(self) -> tuple[str, ...]:
        """Return the parts that are a whole training step."""
        return self.parts[1:] if self.parts == WHOLE else self.parts


def convolution(
    side: int, channels: int, features: int, taps: int = 3, stride: int = 1, is_depthwise: bool = False, is_first: bool = False
) -> Case:
    """Return that of the CIFAR net's batch."""
    rows = 128
    kernel = (taps, taps, 1 if is_depthwise else channels, features)
    flops = 2.0 * rows * (side // stride) ** 2 * taps * taps * kernel[2] * features
    return Case(
        "convolution", (rows, side, side, channels), kernel, flops, ("forward", LINEAR[2]) if is_first else LINEAR, stride
    )


def product(rows: int, inputs: int, outputs: int, is_first: bool = False) -> Case:
    parts = ("forward", LINEAR[2]) if is_first else LINEAR
    return Case("product", (rows, inputs), (inputs, outputs), 2.0 * rows * inputs * outputs, parts)


def recurrent(kind: str, rows: int, places: int, inputs: int, width: int) -> Case:
    gates = {"LSTM": 4, "GRU": 3}[kind]
    return Case(kind, (rows, places, inputs), (width,), 2.0 * rows * places * (inputs + width) * gates * width, WHOLE)


def attention(rows: int, places: int, heads: int, width: int) -> Case:
    return Case("attention", (rows, places, heads, width), (), 4.0 * rows * heads * places**2 * width, WHOLE)


def normalization(rows: int, width: int) -> Case:
    """Return a layer normalization: eight operations for each element."""
    return Case("normalization", (rows, width), (), 8.0 * rows * width, WHOLE)


def batch_normalization(rows: int, side: int, features: int) -> Case:
    """Return a batch normalization with a rectifier: eight operations for each element, too."""
    return Case("batch normalization", (rows, side, side, features), (), 8.0 * rows * side**2 * features, WHOLE)


CASES = {
    "convolution 3 x 3, 3 to 64, 32 x 32": convolution(32, 3, 64, is_first=True),
    "convolution 3 x 3, 64 to 64, 32 x 32": convolution(32, 64, 64),
    "convolution 3 x 3, 256 to 256, 8 x 8": convolution(8, 256, 256),
    "convolution 3 x 3, stride 2, 64 to 128": convolution(32, 64, 128, stride=2),
    "convolution 1 x 1, 64 to 256, 16 x 16": convolution(16, 64, 256, taps=1),
    "depthwise convolution 3 x 3, 64, 32 x 32": convolution(32, 64, 64, is_depthwise=True),
    "product 6000 x 784 x 128": product(6000, 784, 128, is_first=True),
    "product 4096 x 256 x 1024": product(4096, 256, 1024),
    "LSTM, 64 rows, 64 places, 64 to 128": recurrent("LSTM", 64, 64, 64, 128),
    "GRU, 64 rows, 128 places, 64 to 128": recurrent("GRU", 64, 128, 64, 128),
    "attention, 32 rows, 128 places, 4 heads of 64": attention(32, 128, 4, 64),
    "layer normalization, 4096 rows of 256": normalization(4096, 256),
    "batch normalization and rectifier, 128, 16 x 16": batch_normalization(128, 16, 128),
}

SQUARE = 2048
"""The side of the large matrices whose product is measured beside them."""
