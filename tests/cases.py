"""For each operator of the table: the argument lists that every generated test runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# (leading dims, K, N): square, odd, a vector, N-D, no rows, an empty inner dimension, one of everything
LINEAR_SHAPES = [
    ((16,), 32, 8),
    ((5, 3), 17, 9),
    ((), 7, 5),
    ((2, 1, 3), 4, 6),
    ((0,), 8, 4),
    ((3,), 0, 4),
    ((1,), 1, 1),
]


def rand(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(device=device, dtype=dtype)


def _linear_fwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in LINEAR_SHAPES:
            x, w = rand(*lead, k, dtype=dtype, device=device), rand(n, k, dtype=dtype, device=device)
            yield x, w, rand(n, dtype=dtype, device=device)
            yield x, w, None


def _linear_bwd(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in LINEAR_SHAPES:
            for grads in range(8):
                dy = rand(*lead, n, dtype=dtype, device=device)
                x = rand(*lead, k, dtype=dtype, device=device) if grads & 2 else None
                w = rand(n, k, dtype=dtype, device=device) if grads & 1 else None
                yield dy, x, w, grads


def _linear_wgrad(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in DTYPES:
        for lead, k, n in LINEAR_SHAPES:
            for grad_dtype in {dtype, torch.float32}:
                for accumulate in (True, False):
                    dy, x = (
                        rand(*lead, n, dtype=dtype, device=device),
                        rand(*lead, k, dtype=dtype, device=device),
                    )
                    yield dy, x, rand(n, k, dtype=grad_dtype, device=device), accumulate


CASES: dict[str, Callable[[torch.device], Iterator[tuple[Any, ...]]]] = {
    "te_ops::linear_fwd": _linear_fwd,
    "te_ops::linear_bwd": _linear_bwd,
    "te_ops::linear_wgrad": _linear_wgrad,
}
