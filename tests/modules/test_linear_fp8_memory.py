"""What backward keeps of a large output gradient: parts of its codes, with the results of doing it at once."""

from __future__ import annotations

from typing import Any

import pytest
import te_ops as te
import torch
from helpers import linear, relative_error
from te_ops.recipe import DelayedScaling, Float8CurrentScaling
from torch import Tensor

M, N = 16500, 8200  # two copies of dy's codes are more than 256 MiB
pytestmark = [
    pytest.mark.full,
    pytest.mark.parametrize("make", [Float8CurrentScaling, DelayedScaling], ids=["current", "delayed"]),
]


def gradients(layer: Any, recipe: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    for _ in range(2):  # of delayed scaling, the second has scales and rolls a history
        layer.zero_grad()
        x.grad = None
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
    if layer.delay_wgrad_compute:
        layer.backward_dw()
        layer.weight.grad = None
        layer.backward_dw()
    return [x.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("k", [16, 2500])  # with 2500, dw has room for parts of dy
@pytest.mark.parametrize("rows", ["aligned", "odd"])
def test_parts_give_the_whole(make: Any, k: int, rows: str, device: torch.device) -> None:
    if k > 16 and device.type == "cpu":
        pytest.skip("the CPU would take minutes for these products")
    n = N if rows == "aligned" else N - 3
    layer = linear(k, n, device, torch.bfloat16)
    whole = linear(k, n, device, torch.bfloat16, delay_wgrad_compute=True)  # which keeps the codes of dy
    whole.load_state_dict(layer.state_dict())
    x = torch.randn(M, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(M, n, device=device, dtype=torch.bfloat16)
    got = gradients(layer, make(), x, dy)
    want = gradients(whole, make(), x, dy)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 1e-3
    assert torch.equal(got[2], want[2])
    assert torch.equal(layer._fp8_backward_state[1:], whole._fp8_backward_state[1:])
    if make is DelayedScaling:  # staged of all parts
        assert layer._fp8_backward_state[16:].view(torch.float32)[3] == dy.abs().max()


def test_peak_memory(make: Any, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("counts the memory of a GPU")
    layer = linear(4096, 16384, device, torch.bfloat16)
    x = torch.randn(15872, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(15872, 16384, device=device, dtype=torch.bfloat16)
    gradients(layer, make(), x, dy)
    layer.zero_grad()
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with te.autocast(recipe=make()):
        layer(x).backward(dy)
    codes = dy.numel()  # bytes of one copy
    results = 2 * (x.numel() + layer.weight.numel()) + 2 * dy.numel()  # y is alive, too
    saved = x.numel() + layer.weight.numel()
    assert torch.cuda.max_memory_allocated() - before < results + saved + codes // 2
