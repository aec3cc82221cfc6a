"""Activations against torch's functions, eager and compiled, and against a copy of as many bytes.

Floors in bytes for an element of a bf16 y: forward 4 (x read, y written), gated 6; backward 6 (dy and x read, dx
written), gated 10. The bias gradient adds none: it is summed on the way. Against the copy, `ratio` is the copy's time
over ours: the fraction of its bandwidth that is reached. Against torch it is ours over theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import te_ops as te
import torch
from harness import Candidate, Result, device_time, report
from te_ops._activation import backward, check, forward
from torch import Tensor
from torch.nn import functional as F

# The last is odd: element by element.
SHAPES = [(8192, 4096), (8192, 14336), (8192, 28672), (32768, 1024), (8191, 4095)]
LIMIT, ALPHA, OFFSET = check("clamped_swiglu")[2:]

Function = Callable[[Tensor], Tensor]


def swiglu(x: Tensor) -> Tensor:
    a, g = x.chunk(2, dim=-1)
    return F.silu(a) * g


def geglu(x: Tensor) -> Tensor:
    a, g = x.chunk(2, dim=-1)
    return F.gelu(a, approximate="tanh") * g


def clamped_swiglu(x: Tensor) -> Tensor:
    a, g = x.chunk(2, dim=-1)
    a, g = a.clamp(max=LIMIT), g.clamp(-LIMIT, LIMIT)
    return a * torch.sigmoid(ALPHA * a) * (g + OFFSET)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# The cheapest and the dearest of each memory pattern, and the one that most models use.
FUNCTIONS: dict[str, Function] = {
    function.__name__: function for function in (swiglu, geglu, clamped_swiglu, gelu, srelu)
}


def gradients(function: Function, has_db: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def grads(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        _, pullback = torch.func.vjp(function, x)
        (dx,) = pullback(dy)
        return (dx, dx.sum(0)) if has_db else (dx,)

    return grads


def passes(name: str, x: Tensor, dy: Tensor) -> dict[str, tuple[Candidate, dict[str, Candidate], int]]:
    """Pass -> ours, torch's, bytes for an element of y."""
    kind, function = check(name), FUNCTIONS[name]
    more = 2 if kind.is_gated else 1
    compiled = torch.compile(function, fullgraph=True)
    result: dict[str, tuple[Candidate, dict[str, Candidate], int]] = {
        "forward": (
            lambda: forward(x, kind),
            {"torch, eager": lambda: function(x), "torch.compile": lambda: compiled(x)},
            2 * (more + 1),
        )
    }
    for what, has_db in (("backward", False), ("backward + bias gradient", True)):
        theirs = gradients(function, has_db)
        fast = torch.compile(theirs, fullgraph=True)
        result[what] = (
            lambda has_db=has_db: backward(dy, x, kind, has_db),
            {
                "torch, eager": lambda theirs=theirs: theirs(dy, x),
                "torch.compile": lambda fast=fast: fast(dy, x),
            },
            2 * (1 + 2 * more),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "activation.csv")
    args = parser.parse_args()
    if not te.info()["backends"]["cuda"]["usable"]:
        print(f"{Path(__file__).name}: needs a GPU that te_ops can use")
        return
    rounds = 5 if args.quick else 11
    flush = torch.empty(100_000_000, dtype=torch.bfloat16, device="cuda")
    results = []
    with torch.no_grad():
        for m, f in SHAPES[1:2] if args.quick else SHAPES:
            for name in FUNCTIONS:
                torch.compiler.reset()  # or its code would be compiled for any shape, and at some point not at all
                width = f * (2 if check(name).is_gated else 1)
                x = torch.randn(m, width, device="cuda", dtype=torch.bfloat16)
                dy = torch.randn(m, f, device="cuda", dtype=torch.bfloat16)
                for what, (ours, others, size) in passes(name, x, dy).items():
                    moved = size * m * f
                    for against, other in others.items():
                        times = device_time(ours, other, rounds, before=lambda: flush.fill_(1.0))
                        results.append(Result(f"{name}, {what}", f"{m}x{f}", "ms", *times, against))
                    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda").fill_(1)
                    target = torch.empty_like(source)
                    mine, copy, _ = device_time(
                        ours,
                        lambda s=source, t=target: t.copy_(s),
                        rounds,
                        before=lambda: flush.fill_(1.0),
                    )
                    rate = moved / 1e6
                    results.append(
                        Result(
                            f"{name}, {what}",
                            f"{m}x{f}",
                            "GB/s",
                            rate / mine,
                            rate / copy,
                            copy / mine,
                            "device copy",
                        )
                    )
                    print(".", end="", flush=True)
    report(results, args.csv)


if __name__ == "__main__":
    main()
