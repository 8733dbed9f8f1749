"""Four networks, as users of mgpu_core and of PyTorch would write them, and a process that trains one of them.

Both have the same parameters in the same order, so weights are copied from ours to PyTorch's.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NETWORKS = ("mlp", "resnet", "lstm", "transformer")
OURS, TORCH, LAST = "mgpu", "torch", "torch, channels last"
_WARM_UPS = 2

Array = np.ndarray[Any, Any]
Step = Callable[[], float]


def data(network: str) -> tuple[Array, Array]:
    """A batch: inputs, and integer labels. Raises ValueError where there is no such network."""
    if network not in NETWORKS:
        raise ValueError(f"no network is called {network}; there are {', '.join(NETWORKS)}")
    rng = np.random.default_rng(1)
    if network == "mlp":
        return rng.standard_normal((128, 784), dtype=np.float32), rng.integers(0, 10, 128)
    if network == "resnet":
        return rng.standard_normal((128, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 128)
    if network == "lstm":
        return rng.standard_normal((32, 100, 64), dtype=np.float32), rng.integers(0, 32, (32, 100))
    tokens = rng.integers(0, 256, (16, 129))
    return tokens[:, :-1], tokens[:, 1:]


def ours(network: str) -> Any:
    """The network in mgpu_core."""
    from mgpu_core import nn

    rng = np.random.default_rng(0)
    if network == "mlp":
        return nn.Sequential(
            nn.Linear(784, 1024, rng=rng),
            nn.ReLU(),
            nn.Linear(1024, 1024, rng=rng),
            nn.ReLU(),
            nn.Linear(1024, 10, rng=rng),
        )
    if network == "resnet":
        return nn.resnet20(channels=1, classes=10, rng=rng)
    if network == "lstm":
        return nn.Sequential(nn.LSTM(64, 256, layers=2, rng=rng), nn.Linear(256, 32, rng=rng))
    blocks = [nn.TransformerBlock(256, 4, causal=True, rng=rng) for _ in range(4)]
    ends = nn.LayerNorm(256), nn.Linear(256, 256, rng=rng)
    return nn.Sequential(nn.Embedding(256, 256, rng=rng), nn.PositionalEmbedding(128, 256, rng=rng), *blocks, *ends)


def theirs(network: str) -> Any:
    """The network in PyTorch."""
    import torch
    from torch import nn

    class Block(nn.Module):
        """ResNet's basic block."""

        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            self.norm1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
            self.norm2 = nn.BatchNorm2d(outputs)
            self.shortcut = nn.Sequential()
            if stride != 1 or inputs != outputs:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )

        def forward(self, x: Any) -> Any:
            y = torch.relu_(self.norm1(self.conv1(x)))
            return torch.relu_(self.norm2(self.conv2(y)) + self.shortcut(x))

    class GlobalAvgPool2d(nn.Module):
        """The mean over all places."""

        def forward(self, x: Any) -> Any:
            return x.mean((2, 3))

    class Outputs(nn.LSTM):
        """An LSTM that returns its outputs alone."""

        def forward(self, x: Any) -> Any:
            return super().forward(x)[0]

    class Attention(nn.Module):
        """Causal self-attention with four heads."""

        def __init__(self) -> None:
            super().__init__()
            self.projection, self.output = nn.Linear(256, 768), nn.Linear(256, 256)

        def forward(self, x: Any) -> Any:
            q, k, v = self.projection(x).unflatten(2, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.output(y.transpose(1, 2).flatten(2))

    class TransformerBlock(nn.Module):
        """Pre-norm."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention, self.norm2 = nn.LayerNorm(256), Attention(), nn.LayerNorm(256)
            self.widen, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.narrow(nn.functional.gelu(self.widen(self.norm2(x)), approximate="tanh"))

    class Positions(nn.Module):
        """Adds a trained vector to each position."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(128, 256))

        def forward(self, x: Any) -> Any:
            return x + self.weight

    if network == "mlp":
        return nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )  # fmt: skip
    if network == "resnet":
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        blocks = [Block(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:])]
        stem = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        return nn.Sequential(*stem, *blocks, GlobalAvgPool2d(), nn.Linear(64, 10))
    if network == "lstm":
        return nn.Sequential(Outputs(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 32))
    blocks = [TransformerBlock() for _ in range(4)]
    return nn.Sequential(nn.Embedding(256, 256), Positions(), *blocks, nn.LayerNorm(256), nn.Linear(256, 256))


def step_of_ours(network: str) -> Step:
    """A training step of our network."""
    from mgpu_core import Tensor, optim
    from mgpu_core.autograd.memory import keep_freed_memory
    from mgpu_core.nn.functional import cross_entropy

    keep_freed_memory()
    (inputs, labels), model = data(network), ours(network)
    x = Tensor(inputs)
    optimizer: optim.Optimizer
    if network in ("mlp", "resnet"):
        optimizer = optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    else:
        optimizer = optim.AdamW(model.parameters(), 1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def step_of_theirs(network: str, channels_last: bool) -> Step:
    """A training step of PyTorch's network, which starts from our weights."""
    import torch

    model, (inputs, labels) = theirs(network), data(network)
    copy_weights(ours(network), model)
    x, y = torch.from_numpy(inputs.copy()), torch.from_numpy(labels.copy())
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if network in ("mlp", "resnet"):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def copy_weights(source: Any, target: Any) -> None:
    """Our parameters into PyTorch's. Its LSTM adds a second bias to the first, which becomes zero."""
    import torch

    arrays = [parameter.data for parameter in source.parameters()]
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "bias_hh" in name:
                parameter.zero_().requires_grad_(False)
            else:
                parameter.copy_(torch.from_numpy(np.array(arrays.pop(0))))
    assert not arrays, "the two networks have different parameters"


def serve(network: str, side: str, threads: int) -> None:
    """Train in this process as it is told to on standard input: so many steps for each line.

    Answers are lines of JSON: first this side's version and the first loss, then each line's times in ns, and with
    them the bytes of memory that steps took at most beyond those of the libraries.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    if side == OURS:
        import mgpu_core
        from mgpu_core.autograd import cpu  # noqa: F401  # compilers and kernels count as libraries

        version, before = f"mgpu {mgpu_core.__version__}", memory("VmRSS")
        step = step_of_ours(network)
    else:
        import torch

        torch.set_num_threads(threads)
        version, before = f"torch {torch.__version__}", memory("VmRSS")
        step = step_of_theirs(network, side == LAST)
    loss = [step() for _ in range(_WARM_UPS)][0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    print(json.dumps({"version": version, "loss": loss}), file=answers, flush=True)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            begin = time.perf_counter_ns()
            step()
            taken.append(time.perf_counter_ns() - begin)
        print(json.dumps({"ns": taken, "memory": memory("VmHWM") - before}), file=answers, flush=True)


def memory(kind: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])
