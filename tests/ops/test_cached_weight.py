"""The cast of a weight that asks first whether the codes are still right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ops = torch.ops.te_ops
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])


class Held:
    """The buffers of a cached weight; `spoil` tells whether they are written again."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.row = torch.empty(shape, dtype=E4M3, device=device)
        self.col = torch.empty(shape[::-1], dtype=E4M3, device=device)
        self.row_scale_inv, self.col_scale_inv = torch.empty(2, 1, device=device)
        self.fingerprint = torch.zeros(2, dtype=torch.int32, device=device)

    def update(
        self, x: Tensor, scale: Tensor | None = None, salt: int = 0, pow2: bool = False, force: bool = False
    ) -> None:
        op = ops.cache_weight if force else ops.refresh_weight
        op(x, scale, self.row, self.row_scale_inv, self.col, self.col_scale_inv, self.fingerprint, salt, pow2)

    def spoil(self) -> None:
        for t in (self.row, self.col):
            t.view(torch.uint8).fill_(0x55)
        self.row_scale_inv.fill_(-1)

    def is_spoiled(self) -> bool:
        codes = [bool((t.view(torch.uint8) == 0x55).all()) for t in (self.row, self.col)]
        return all(codes) and self.row_scale_inv.item() == -1

    def is_right(self, x: Tensor, scale: Tensor | None = None, pow2: bool = False) -> bool:
        row, col, scale_inv, *_ = ops.quantize(x, scale, 4 | 8 | (2 if pow2 else 0))
        scales = [(s, scale_inv) for s in (self.row_scale_inv, self.col_scale_inv)]
        pairs = ((self.row, row), (self.col, col), *scales)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@DTYPE
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 33), (40, 64), (130, 200), (300, 257)], ids=str)
def test_only_changes_are_written(shape: Any, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    held = Held(shape, device)
    held.update(x)
    assert held.is_right(x)
    held.spoil()
    held.update(x.clone())
    assert held.is_spoiled()
    for at in {0, 1, 7, x.numel() // 2, x.numel() - 1} & set(range(x.numel())):
        x.view(-1)[at] += 1
        held.update(x)
        assert held.is_right(x)
        held.spoil()
        held.update(x)
        assert held.is_spoiled()


@DTYPE
def test_what_counts_as_a_change(dtype: torch.dtype, device: torch.device) -> None:
    x, scale = torch.randn(24, 40, device=device).to(dtype), torch.tensor([3.0], device=device)
    held = Held((24, 40), device)
    x[0, 0], x[5, 5] = 0.0, 1.0
    held.update(x)
    negative = x.clone()
    negative[0, 0] = -0.0
    swapped = x.clone()
    swapped[3, 4], swapped[20, 1] = x[20, 1], x[3, 4]
    for changed in (negative, swapped, swapped.t().contiguous().view(24, 40), x):
        held.spoil()
        held.update(changed)
        assert held.is_right(changed)
    held.spoil()
    held.update(x, salt=1)  # other rules
    assert held.is_right(x)
    held.spoil()
    held.update(x, scale=scale, salt=1)  # the scale of delayed scaling moves on; what is held stays
    assert held.is_spoiled()
    held.update(x, scale=scale, salt=1, force=True)
    assert held.is_right(x, scale)
    held.update(x, salt=2, pow2=True)
    assert held.is_right(x, pow2=True)


def test_an_address_of_any_alignment(device: torch.device) -> None:
    memory = torch.randn(24 * 40 + 3, device=device).bfloat16()
    held = Held((24, 40), device)
    for at in range(3):
        x = memory[at : at + 24 * 40].view(24, 40)
        held.update(x)
        assert held.is_right(x)
        held.spoil()
        held.update(x.clone())  # the same values, whose address is another
        assert held.is_spoiled()


@pytest.mark.full
def test_large(cuda: torch.device) -> None:
    x = torch.randn(8192, 8192, device=cuda, dtype=torch.bfloat16)
    held = Held((8192, 8192), cuda)
    held.update(x)
    for at in torch.randint(x.numel(), (20,)).tolist():
        held.spoil()
        held.update(x)
        assert held.is_spoiled()
        x.view(-1)[at] *= 2
        held.update(x)
        assert held.is_right(x)
