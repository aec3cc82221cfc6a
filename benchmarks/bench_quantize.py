"""The quantizer kernels against a device copy of as many bytes: the floor is one read and one write of each result.

`ratio` is the copy's time over the kernel's: the fraction of copy bandwidth that is reached.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import te_ops as te
import torch
from harness import Candidate, Result, device_time, report
from torch import Tensor

SHAPES = [(8192, 4096), (8192, 14336), (15872, 16384), (8191, 4095)]
E5M2, POW2, ROW, COL, AMAX, SUMS = (1 << i for i in range(6))  # flags of te_ops::quantize
ops = torch.ops.te_ops


def kernels(x: Tensor) -> dict[str, tuple[Candidate, float]]:
    """Name -> (call, bytes a element that it must move)."""
    scale = torch.ones(1, device=x.device)
    codes = ops.quantize(x, scale, ROW)[0]
    return {
        "amax": (lambda: ops.amax(x), 2),
        "delayed cast, row": (lambda: ops.quantize(x, scale, ROW | AMAX), 3),
        "delayed cast, column": (lambda: ops.quantize(x, scale, COL | AMAX), 3),
        "delayed cast, row + column": (lambda: ops.quantize(x, scale, ROW | COL | AMAX), 4),
        "delayed cast, row + column + bias gradient": (
            lambda: ops.quantize(x, scale, ROW | COL | AMAX | SUMS),
            4,
        ),
        "current scaling, row + column (two reads)": (lambda: ops.quantize(x, None, ROW | COL), 6),
        "transpose of codes": (lambda: ops.transpose_codes(codes), 2),
        "dequantize": (lambda: ops.dequantize(codes, scale, 0), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "quantize.csv")
    args = parser.parse_args()
    if not te.info()["backends"]["cuda"]["usable"]:
        print(f"{Path(__file__).name}: needs a GPU that te_ops can use")
        return
    flush = torch.empty(100_000_000, dtype=torch.bfloat16, device="cuda")
    results = []
    for m, k in SHAPES[:1] if args.quick else SHAPES:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        for what, (call, width) in kernels(x).items():
            moved = width * m * k
            source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            ours, copy, _ = device_time(
                call, lambda s=source, t=target: t.copy_(s), rounds=11, before=lambda: flush.fill_(1.0)
            )
            rate = moved / 1e6
            results.append(
                Result(what, f"{m}x{k}", "GB/s", rate / ours, rate / copy, copy / ours, "device copy")
            )
            print(".", end="", flush=True)
    report(results, args.csv)


if __name__ == "__main__":
    main()
