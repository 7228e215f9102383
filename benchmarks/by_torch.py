"""Hand-written torch: the models of `workloads` as modules, a plain loop, alone or with DDP over gloo.

python by_torch.py WORKLOAD SETTINGS-AS-JSON

With {"cuda": true} each process has a GPU, and DDP is over NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
from typing import Any

import cores
import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from timing import Ready, report_epochs
from torch import nn
from torch.nn import functional
from workloads import BLOCKS, CLASSES, HEADS, MOBILENET, MORE, RESNET, TINY, TOKENS, VOCABULARY, WIDTH, WORKLOADS


class FromKeras(nn.Module):
    """Images with their channels last, as the data have them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2)


class Cifar(nn.Sequential):
    def __init__(self) -> None:
        parts: list[nn.Module] = [FromKeras()]
        channels = 3
        for features in (64, 128, 256):
            for _ in range(3):
                parts += [nn.Conv2d(channels, features, 3, padding=1), nn.BatchNorm2d(features), nn.ReLU()]
                channels = features
            parts.append(nn.AvgPool2d(2) if features < 256 else nn.AdaptiveAvgPool2d(1))
        super().__init__(*parts, nn.Flatten(), nn.Linear(256, CLASSES))


class Residual(nn.Module):
    """The sum of a path and of a shortcut."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.path(x) + self.shortcut(x)


class ResNet(nn.Sequential):
    """Keras' form of the net: a block strides in its first convolution, and convolutions have biases."""

    def __init__(self) -> None:
        parts: list[nn.Module] = [FromKeras(), *self.convolved(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for features, blocks, first_stride in RESNET:
            for block in range(blocks):
                stride = 1 if block else first_stride
                first = *self.convolved(channels, features, 1, stride), nn.ReLU()
                second = *self.convolved(features, features, 3), nn.ReLU()
                path = nn.Sequential(*first, *second, *self.convolved(features, 4 * features, 1))
                shortcut = nn.Identity() if block else nn.Sequential(*self.convolved(channels, 4 * features, 1, stride))
                parts += [Residual(path, shortcut), nn.ReLU()]
                channels = 4 * features
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))

    @staticmethod
    def convolved(channels: int, features: int, taps: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(channels, features, taps, stride, padding=taps // 2), nn.BatchNorm2d(features, 1.001e-5, 0.01)]


class MobileNet(nn.Sequential):
    def __init__(self) -> None:
        parts: list[nn.Module] = [FromKeras(), *self.convolved(3, 32, 3, 2), nn.ReLU6()]
        channels = 32
        for expansion, features, blocks, first_stride in MOBILENET:
            for block in range(blocks):
                stride = 1 if block else first_stride
                wide = expansion * channels
                path: list[nn.Module] = [*self.convolved(channels, wide, 1), nn.ReLU6()] if expansion > 1 else []
                path += [*self.convolved(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *self.convolved(wide, features, 1)]
                parts += [Residual(nn.Sequential(*path), nn.Identity())] if block else path
                channels = features
        parts += [*self.convolved(channels, 1280, 1), nn.ReLU6()]
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES))

    @staticmethod
    def convolved(channels: int, features: int, taps: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        """Return a convolution and its normalization. Where it strides, Keras pads pictures of even sizes on the right and below alone."""
        border: list[nn.Module] = [nn.ZeroPad2d((0, 1, 0, 1))] if stride > 1 else []
        padding = 0 if border else taps // 2
        convolution = nn.Conv2d(channels, features, taps, stride, padding, groups=groups, bias=False)
        return [*border, convolution, nn.BatchNorm2d(features, 1e-3, 0.001)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.first = nn.LayerNorm(WIDTH, 1e-3)
        self.second = nn.LayerNorm(WIDTH, 1e-3)

    def forward(self, x: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        q, k, v = self.queries(x).view(rows, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_word[:, None, None, :])
        x = self.first(x + self.out(mixed.transpose(1, 2).reshape(rows, TOKENS, WIDTH)))
        return self.second(x + self.narrow(functional.relu(self.wide(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.top = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        is_word = words != 0
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x, is_word)
        weights = is_word[..., None].to(x.dtype)
        return self.top((x * weights).sum(1) / weights.sum(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.top = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.lstm(x)[0][:, -1])


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.top = nn.Linear(128, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        lengths = (words != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        return self.top(self.gru(packed)[1][-1])


def mnist(*features: int) -> nn.Module:
    parts: list[nn.Module] = [FromKeras()]
    channels = 1
    side = 28
    for count in features:
        parts += [nn.Conv2d(channels, count, 3), nn.ReLU(), nn.MaxPool2d(2)]
        channels = count
        side = (side - 2) // 2
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels * side * side, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_model_and_optimizer(name: str) -> tuple[nn.Module, Any]:
    """Return a model and the function that makes its optimizer."""
    adam = lambda rate: lambda parameters: torch.optim.Adam(parameters, rate, eps=1e-7)  # noqa: E731
    sgd = lambda rate: lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9)  # noqa: E731
    return {
        "W1 MNIST, two convolutions": lambda: (mnist(32, 64), adam(1e-3)),
        "W1 MNIST, one convolution": lambda: (mnist(32), adam(1e-3)),
        "W2 CIFAR": lambda: (Cifar(), sgd(0.1)),
        TINY: lambda: (mlp(64, 32, nn.ReLU()), adam(1e-3)),
        "W3 MLP, batch 32": lambda: (mlp(784, 128, nn.Sigmoid()), adam(1e-4)),
        "W3 MLP, batch 6000": lambda: (mlp(784, 128, nn.Sigmoid()), adam(1e-4)),
        "W4 transformer": lambda: (Transformer(), adam(1e-4)),
        "W5 LSTM": lambda: (Lstm(), adam(1e-3)),
        "W6 ResNet-50": lambda: (ResNet(), sgd(0.01)),
        "W7 MobileNetV2": lambda: (MobileNet(), sgd(0.01)),
        "W8 GRU with masks": lambda: (Gru(), adam(1e-3)),
    }[name]()


def mlp(inputs: int, width: int, activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), activation, nn.Linear(width, CLASSES))


def train_process(process: int, name: str, settings: dict[str, Any], port: int) -> None:
    processes = settings.get("processes", 1)
    torch.set_num_threads(settings.get("threads", max(1, (os.cpu_count() or 1) // processes)))
    device = torch.device("cuda", process) if settings.get("cuda") else torch.device("cpu")
    if processes > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, f"tcp://127.0.0.1:{port}", world_size=processes, rank=process)
    torch.manual_seed(0)
    model, optimizer_of = make_model_and_optimizer(name)
    model = model.to(device)
    if settings.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    optimizer = optimizer_of(model.parameters())
    step: Any = nn.parallel.DistributedDataParallel(model) if processes > 1 else model
    step = torch.compile(step) if settings.get("compile") else step
    workload = (WORKLOADS | MORE)[name]
    x, y = (torch.from_numpy(np.ascontiguousarray(array)) for array in workload.data())
    y = y.long()
    share = workload.batch // processes

    def epoch(number: int) -> None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        for first in range(0, len(x), workload.batch):
            mine = order[first + process * share : first + (process + 1) * share]
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(step(x[mine].to(device)), y[mine].to(device)).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    is_ready = (
        cores.make_ready_check()
        if processes == 1
        else functools.partial(is_ready_in_all, process, device, cores.make_ready_check())
    )
    with contextlib.nullcontext() if process == 0 else contextlib.redirect_stdout(None):
        report_epochs(workload, epoch, is_ready)
    if processes > 1:
        torch.distributed.destroy_process_group()


def is_ready_in_all(process: int, device: torch.device, is_ready: Ready) -> bool:
    """Return the answer of process 0 in all processes, so that all train as many epochs."""
    said = torch.tensor([process == 0 and is_ready()], device=device)
    torch.distributed.broadcast(said, 0)
    return bool(said)


def main() -> None:
    name = sys.argv[1]
    settings = json.loads(sys.argv[2])
    if settings.get("cuda") and not torch.cuda.is_available():
        sys.exit("torch has no CUDA here")
    with contextlib.closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    if settings.get("processes", 1) == 1:
        train_process(0, name, settings, port)
    else:
        torch.multiprocessing.spawn(train_process, (name, settings, port), settings["processes"])


if __name__ == "__main__":
    main()
