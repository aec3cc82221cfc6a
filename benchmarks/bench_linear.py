"""te_ops.Linear against torch.nn.Linear: host cost, GPU time, compile time, memory.

Floors for forward and backward of M x K by N, in bf16: 6 M N K operations (the GPU's matrix rate decides for
large sizes); the bias gradient adds one read of dy, 2 M N bytes, unless it rides on the weight gradient.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # compile time means cold compile time

import te_ops as te
import torch
from harness import Candidate, Result, device_time, graph_replay, host_time, peak_memory, report
from torch import Tensor, nn

# (M, K, N): square, MLP, odd
LARGE = [(15872, 4096, 16384), (8192, 8192, 8192), (8192, 4096, 4096)]
MIDDLE = [(4096, 4096, 14336), (2048, 1024, 1024), (4095, 1000, 3001), (513, 4096, 4096)]
SMALL = (64, 64, 64)
HOST_BOUND = [SMALL, (256, 256, 256)]  # with gradients in one launch of our own kernel, and without

Pair = tuple[nn.Module, nn.Module]


def layers(k: int, n: int, device: torch.device, dtype: torch.dtype) -> Pair:
    ours, baseline = (
        te.Linear(k, n, device=device, params_dtype=dtype),
        nn.Linear(k, n, device=device, dtype=dtype),
    )
    baseline.load_state_dict(ours.state_dict())
    return ours, baseline


def training(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, dy: Tensor) -> Candidate:
    """Forward and backward, gradients dropped at the end as an optimizer would."""
    leaves = [x, *module.parameters()]

    def step() -> None:
        call(x).backward(dy)
        for leaf in leaves:
            leaf.grad = None

    return step


def inference(call: Callable[[Tensor], Tensor], x: Tensor) -> Candidate:
    def step() -> Tensor:
        with torch.no_grad():
            return call(x)

    return step


def compile_seconds(module: nn.Module, x: Tensor, dy: Tensor) -> float:
    torch._dynamo.reset()
    fn = torch.compile(module, fullgraph=True)
    start = time.perf_counter()
    training(fn, module, x, dy)()
    return time.perf_counter() - start


class Bench:
    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.results: list[Result] = []

    def add(
        self, what: str, shape: tuple[int, int, int], unit: str, values: tuple[float, float, float]
    ) -> None:
        m, k, n = shape
        self.results.append(Result(what, f"{m}x{k}->{n}", unit, *values, "nn.Linear"))
        print(".", end="", flush=True)

    def data(self, shape: tuple[int, int, int]) -> tuple[Pair, Tensor, Tensor]:
        m, k, n = shape
        x = torch.randn(m, k, device=self.device, dtype=self.dtype, requires_grad=True)
        return (
            layers(k, n, self.device, self.dtype),
            x,
            torch.randn(m, n, device=self.device, dtype=self.dtype),
        )

    def host(self) -> None:
        rounds = 11 if self.quick else 61
        for shape in HOST_BOUND:
            pair, x, dy = self.data(shape)
            forward = [inference(m, x) for m in pair]
            self.add("host, forward, no_grad", shape, "us", host_time(*forward, calls=500, rounds=rounds))
            with_grad = [lambda m=m, x=x: m(x) for m in pair]
            self.add("host, forward", shape, "us", host_time(*with_grad, calls=500, rounds=rounds))
            both = [training(m, m, x, dy) for m in pair]
            self.add("host, forward + backward", shape, "us", host_time(*both, calls=200, rounds=rounds))

    def compiled(self) -> None:
        pair, x, dy = self.data(SMALL)
        rounds = 11 if self.quick else 61
        repeats = 2 if self.quick else 5
        compile_seconds(pair[1], x, dy)  # loads the compiler itself
        seconds = [[compile_seconds(m, x, dy) for m in pair] for _ in range(repeats)]
        ratio = statistics.median(a / b for a, b in seconds)
        ours, baseline = (statistics.median(s[i] for s in seconds) for i in (0, 1))
        self.add("compile, cold, forward + backward", SMALL, "s", (ours, baseline, ratio))
        torch._dynamo.reset()
        fns = [torch.compile(m, fullgraph=True) for m in pair]
        self.add("host, compiled, forward, no_grad", SMALL, "us",
                 host_time(*(inference(f, x) for f in fns), calls=500, rounds=rounds))  # fmt: skip
        both = [training(f, m, x, dy) for f, m in zip(fns, pair, strict=True)]
        self.add(
            "host, compiled, forward + backward", SMALL, "us", host_time(*both, calls=200, rounds=rounds)
        )

    def gpu(self) -> None:
        shapes = LARGE[1:2] if self.quick else LARGE + MIDDLE
        for shape in shapes:
            pair, x, dy = self.data(shape)
            rounds = 11 if self.quick else 41
            self.add(
                "GPU, forward, no_grad",
                shape,
                "ms",
                device_time(*(inference(m, x) for m in pair), rounds=rounds),
            )
            both = [training(m, m, x, dy) for m in pair]
            self.add("GPU, forward + backward", shape, "ms", device_time(*both, rounds=rounds))
            ours, baseline = (peak_memory(f) for f in both)
            self.add("peak extra memory, forward + backward", shape, "MiB", (ours, baseline, ours / baseline))
            del pair, x, dy, both
            torch.cuda.empty_cache()

    def graphs(self) -> None:
        for shape in (SMALL, (2048, 1024, 1024)):
            pair, x, dy = self.data(shape)
            replays = [graph_replay(training(m, m, x, dy)) for m in pair]
            self.add("CUDA graph replay, forward + backward", shape, "ms", device_time(*replays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "linear.csv")
    parser.add_argument("--autotune", type=int, default=1, help="GEMM candidates to time")
    args = parser.parse_args()
    te.set_gemm_autotune(args.autotune)
    bench = Bench(torch.device("cuda" if te.info()["backends"]["cuda"]["usable"] else "cpu"), args.quick)
    steps: list[Any] = (
        [bench.host] if args.quick and bench.device.type == "cpu" else [bench.host, bench.compiled]
    )
    if bench.device.type == "cuda":
        steps += [bench.gpu, bench.graphs]
    for step in steps:
        step()
    report(bench.results, args.csv)


if __name__ == "__main__":
    main()
