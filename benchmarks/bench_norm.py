"""te_ops.LayerNorm and RMSNorm against torch.nn's, eager and compiled, and against a copy of as many bytes.

Floors in bytes an element of bf16: forward 4 (x read, y written), backward 6 (dy and x read, dx written).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import te_ops as te
import torch
from harness import Candidate, Result, device_time, report
from torch import Tensor, nn

WIDTHS = (1024, 2048, 4096, 8192, 16384)
ELEMENTS = 1 << 27
KINDS: dict[str, tuple[Any, Any]] = {
    "LayerNorm": (te.LayerNorm, nn.LayerNorm),
    "RMSNorm": (te.RMSNorm, nn.RMSNorm),
}


def forward_of(module: Any, x: Tensor) -> Candidate:
    def call() -> None:
        with torch.no_grad():
            module(x)

    return call


def backward_of(module: Any, x: Tensor, dy: Tensor) -> Candidate:
    y = module(x)
    leaves = [x, *module.parameters()]

    def call() -> None:
        torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "norm.csv")
    args = parser.parse_args()
    if not te.info()["backends"]["cuda"]["usable"]:
        print(f"{Path(__file__).name}: needs a GPU that te_ops can use")
        return
    results = []
    flush = torch.empty(100_000_000, dtype=torch.bfloat16, device="cuda")
    for k in WIDTHS[2:3] if args.quick else WIDTHS:
        m = ELEMENTS // k
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        for name, (ours, theirs) in KINDS.items():
            a = ours(k, device="cuda", dtype=torch.bfloat16)
            b = theirs(k, eps=1e-5, device="cuda", dtype=torch.bfloat16)
            calls = {
                "forward": (forward_of(a, x), forward_of(b, x), 4),
                "backward": (backward_of(a, x, dy), backward_of(b, x, dy), 6),
            }
            for direction, (mine, base, width) in calls.items():
                source = torch.randint(256, (width * m * k // 2,), dtype=torch.uint8, device="cuda")
                target = torch.empty_like(source)
                copies: dict[str, Candidate] = {
                    f"torch.nn.{name}": base,
                    "device copy": lambda s=source, t=target: t.copy_(s),
                }
                for against, other in copies.items():
                    values = device_time(mine, other, rounds=11, before=lambda: flush.fill_(1.0))
                    results.append(Result(f"{name}, {direction}", f"{m}x{k}", "ms", *values, against))
                print(".", end="", flush=True)
    report(results, args.csv)


if __name__ == "__main__":
    main()
