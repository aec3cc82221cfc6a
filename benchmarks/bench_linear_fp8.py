"""te_ops.Linear under per-tensor FP8 recipes against torch.nn.Linear in bf16: speed, host cost, memory, compile time.

Floors for forward and backward of M x K by N: 6 M N K operations at the FP8 rate, and the quantizers' bytes
(x and w: 2 read, 2 written an element; dy the same; current scaling reads each once more).
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import te_ops as te
import torch
from bench_linear import compile_seconds, layers
from harness import Candidate, Result, device_time, graph_replay, host_time, peak_memory, report
from torch import Tensor, nn

SHAPES = [(15872, 4096, 16384), (8192, 8192, 8192), (8192, 4096, 4096)]
SMALL = (64, 64, 64)
RECIPES = {"delayed": te.recipe.DelayedScaling, "current": te.recipe.Float8CurrentScaling}


def step_of(
    module: Any, recipe: Any, x: Tensor, dy: Tensor, leaves: list[Tensor], **kwargs: Any
) -> Candidate:
    def step() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, **kwargs)
        y.backward(dy)
        for leaf in leaves:
            leaf.grad = None

    return step


def inference_of(module: Any, recipe: Any, x: Tensor) -> Candidate:
    def step() -> None:
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            module(x)

    return step


def plain_step(module: nn.Module, x: Tensor, dy: Tensor, leaves: list[Tensor]) -> Candidate:
    def step() -> None:
        module(x).backward(dy)
        for leaf in leaves:
            leaf.grad = None

    return step


def plain_inference(module: nn.Module, x: Tensor) -> Candidate:
    def step() -> None:
        with torch.no_grad():
            module(x)

    return step


def te_ops_cache_off(module: Any) -> None:
    """Forgets the cached weights, whose memory would count."""
    module.to(module.weight.device)


def paired(samples: list[tuple[float, float]]) -> tuple[float, float, float]:
    ours, baseline = (statistics.median(s[i] for s in samples) for i in (0, 1))
    return ours, baseline, statistics.median(a / b for a, b in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "linear_fp8.csv")
    parser.add_argument("--autotune", type=int, default=1, help="GEMM candidates to time")
    args = parser.parse_args()
    if not te.info()["backends"]["cuda"]["usable"]:
        print(f"{Path(__file__).name}: needs a GPU that te_ops can use")
        return
    te.set_gemm_autotune(args.autotune)
    device, dtype = torch.device("cuda"), torch.bfloat16
    results: list[Result] = []
    rounds = 11 if args.quick else 41

    def add(what: str, shape: tuple[int, int, int], unit: str, values: tuple[float, float, float]) -> None:
        results.append(Result(what, f"{shape[0]}x{shape[1]}->{shape[2]}", unit, *values, "nn.Linear"))
        print(".", end="", flush=True)

    def setup(shape: tuple[int, int, int]) -> tuple[Any, Any, Tensor, Tensor, list[Tensor]]:
        m, k, n = shape
        ours, baseline = layers(k, n, device, dtype)
        x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
        dy = torch.randn(m, n, device=device, dtype=dtype)
        return ours, baseline, x, dy, [x, *ours.parameters(), *baseline.parameters()]

    for shape in SHAPES[1:2] if args.quick else SHAPES:
        ours, baseline, x, dy, leaves = setup(shape)
        base = plain_step(baseline, x, dy, leaves)
        for name, recipe in RECIPES.items():
            step = step_of(ours, recipe(), x, dy, leaves)
            mine, theirs, ratio = device_time(step, base, rounds=rounds)
            add(f"GPU, forward + backward, {name}", shape, "ms", (mine, theirs, ratio))
            print(f" {name} {shape}: speed-up {1 / ratio:.3f}", flush=True)
            cached = step_of(ours, recipe(), x, dy, leaves, is_first_microbatch=False)
            mine, theirs, ratio = device_time(cached, base, rounds=rounds)
            add(f"GPU, forward + backward, {name}, cached weights", shape, "ms", (mine, theirs, ratio))
            print(f" {name} cached {shape}: speed-up {1 / ratio:.3f}", flush=True)
            te_ops_cache_off(ours)
            memory = peak_memory(step), peak_memory(base)
            add(f"peak extra memory, {name}", shape, "MiB", (*memory, memory[0] / memory[1]))
        del ours, baseline, x, dy, leaves, base, step
        torch.cuda.empty_cache()
    ours, baseline, x, dy, leaves = setup(SMALL)
    for name, recipe in RECIPES.items():
        add(f"host, forward, no_grad, {name}", SMALL, "us",
            host_time(inference_of(ours, recipe(), x), plain_inference(baseline, x)))  # fmt: skip
        step, base = step_of(ours, recipe(), x, dy, leaves), plain_step(baseline, x, dy, leaves)
        add(f"host, forward + backward, {name}", SMALL, "us", host_time(step, base))
        with te.autocast(recipe=recipe()):
            seconds = [(compile_seconds(ours, x, dy), compile_seconds(baseline, x, dy)) for _ in range(4)][1:]
        add(f"compile, cold, {name}", SMALL, "s", paired(seconds))
        torch._dynamo.reset()
        add(f"CUDA graph replay, {name}", SMALL, "ms", device_time(graph_replay(step), graph_replay(base)))
    report(results, args.csv)


if __name__ == "__main__":
    main()
