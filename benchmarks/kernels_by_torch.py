"""Seconds of each operation in torch, on all cores; of a convolution, in the faster of two layouts.

python benchmarks/kernels_by_torch.py [PART OF A NAME ...]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import CASES, SQUARE, WHOLE, Case
from timing import measure_seconds
from torch import nn
from torch.nn import functional


def convolution_calls(case: Case, layout: Any) -> dict[str, Callable[[], Any]]:
    """Return a call of each part. Where they stride, Keras pads pictures of even sizes on the right and below alone."""
    rows, side, _, channels = case.x
    taps, _, inner, features = case.kernel
    border = taps // 2 if case.stride == 1 else 0
    wide = side + (0 if case.stride == 1 else taps - case.stride)
    x = torch.randn(rows, channels, wide, wide).to(memory_format=layout)
    w = torch.randn(features, inner, taps, taps).to(memory_format=layout)
    settings = {"stride": [case.stride] * 2, "padding": [border] * 2, "dilation": [1, 1]}
    groups = channels // inner
    forward = lambda: functional.conv2d(x, w, None, **settings, groups=groups)  # noqa: E731
    back = torch.randn_like(forward()).to(memory_format=layout)

    def backward(by_input: bool) -> Any:
        return torch.ops.aten.convolution_backward(
            back, x, w, None, *settings.values(), False, [0, 0], groups, [by_input, not by_input, False]
        )

    return {"forward": forward, "by the input": lambda: backward(True), "by the kernel": lambda: backward(False)}


def product_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Return a call of each part, with the kernel as `nn.Linear` has it."""
    x = torch.randn(*case.x)
    w = torch.randn(*reversed(case.kernel))
    back = torch.randn(case.x[0], case.kernel[1])
    return {"forward": lambda: x @ w.T, "by the input": lambda: back @ w, "by the kernel": lambda: back.T @ x}


def whole_calls(case: Case) -> dict[str, Callable[[], Any]]:
    if case.kind == "attention":
        arrays = [torch.randn(*case.x).transpose(1, 2).requires_grad_() for _ in range(3)]
        function = functional.scaled_dot_product_attention
    elif case.kind == "normalization":
        arrays = [torch.randn(*case.x).requires_grad_()]
        function = nn.LayerNorm(case.x[-1])
    elif case.kind == "batch normalization":
        rows, *sides, features = case.x
        arrays = [torch.randn(rows, features, *sides).requires_grad_()]
        function = nn.Sequential(nn.BatchNorm2d(features), nn.ReLU())
    else:
        layer = {"LSTM": nn.LSTM, "GRU": nn.GRU}[case.kind](case.x[-1], *case.kernel, batch_first=True)
        arrays = [torch.randn(*case.x).requires_grad_()]
        function = lambda x: layer(x)[0][:, -1]  # noqa: E731

    def forward() -> Any:
        with torch.no_grad():
            return function(*arrays)

    def both() -> None:
        for array in arrays:
            array.grad = None
        (function(*arrays) ** 2).sum().backward()

    return {WHOLE[0]: forward, WHOLE[1]: both}


def list_ways(case: Case) -> list[dict[str, Callable[[], Any]]]:
    """Return the calls of each part, for each way to compute them."""
    if case.kind == "convolution":
        return [convolution_calls(case, layout) for layout in (torch.channels_last, torch.contiguous_format)]
    return [product_calls(case) if case.kind == "product" else whole_calls(case)]


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    wanted = {name: case for name, case in CASES.items() if not sys.argv[1:] or any(part in name for part in sys.argv[1:])}
    seconds = {
        name: {part: min(measure_seconds(way[part]) for way in list_ways(case)) for part in case.parts}
        for name, case in wanted.items()
    }
    square = torch.randn(SQUARE, SQUARE)
    seconds["square"] = {"forward": measure_seconds(lambda: square @ square)}
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
