"""The norm operators against float64 and, on CUDA, against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, TOLERANCE, relative_error
from torch import Tensor

ops = torch.ops.te_ops
ZERO_CENTERED, SAVE = 1, 2
GRADS = 2 | 4 | 8
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
KIND = pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
WIDTHS = [1, 3, 8, 40, 255, 256, 1000, 1024, 2056, 4096, 5000, 8192]


def reference(
    kind: str, x: Tensor, gamma: Tensor, beta: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1) if kind == "layernorm" else torch.zeros_like(x[:, 0])
    centered = x - mean[:, None]
    rstd = 1 / (centered.square().mean(-1) + eps).sqrt()
    y = centered * rstd[:, None] * (gamma + 1 if zero_centered else gamma)
    return y + beta if kind == "layernorm" else y, mean, rstd


def run(kind: str, x: Tensor, gamma: Tensor, beta: Tensor, eps: float, options: int) -> list[Any]:
    if kind == "layernorm":
        return list(ops.layernorm_fwd(x, gamma, beta, eps, options))
    y, rstd = ops.rmsnorm_fwd(x, gamma, eps, options)
    return [y, None if rstd is None else torch.zeros_like(rstd), rstd]


def backward(
    kind: str, dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, options: int
) -> Any:
    if kind == "layernorm":
        return ops.layernorm_bwd(dy, x, gamma, mean, rstd, options)
    return *ops.rmsnorm_bwd(dy, x, gamma, rstd, options & 7), None


@KIND
@DTYPE
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
def test_against_float64(
    kind: str, dtype: torch.dtype, k: int, zero_centered: bool, device: torch.device
) -> None:
    x, dy = (torch.randn(37, k, device=device).to(dtype) for _ in range(2))
    gamma, beta = (torch.randn(k, device=device).to(dtype) for _ in range(2))
    y, mean, rstd = run(kind, x, gamma, beta, 1e-5, SAVE | zero_centered)
    x64, gamma64, beta64 = (t.double().requires_grad_() for t in (x, gamma, beta))
    want = reference(kind, x64, gamma64, beta64, 1e-5, zero_centered)
    limit = TOLERANCE[dtype]
    assert relative_error(y, want[0]) < limit
    assert relative_error(rstd, want[2]) < 1e-5
    want[0].backward(dy.double())
    dx, dgamma, dbeta = backward(kind, dy, x, gamma, mean, rstd, GRADS | zero_centered)
    terms = want[2].detach()[:, None] * dy.double() * gamma64.detach()  # that may cancel
    assert (dx.double() - x64.grad).norm() < limit * x64.grad.norm() + 2e-6 * terms.norm()
    xhat = (x64 - want[1][:, None]).detach() * want[2].detach()[:, None]
    usual = (dy.double() * xhat).norm(dim=0), dy.double().norm(dim=0)  # where sums may cancel
    assert relative_error(dgamma, gamma64.grad, usual[0]) < 2 * limit
    if dbeta is not None:
        assert relative_error(dbeta, beta64.grad, usual[1]) < limit


@KIND
@pytest.mark.parametrize("k", [64, 1024, 1000])
def test_hard_rows(kind: str, k: int, device: torch.device) -> None:
    """A mean far above what varies, constant rows, zeros, values near the ends of fp16."""
    rows = [
        1e4 + torch.randn(k),
        torch.full((k,), 3.0),
        torch.zeros(k),
        torch.randn(k) * 1e-12,
        torch.randn(k) * 1e15,
    ]
    x = torch.stack(rows).to(device)
    gamma, beta = torch.randn(k, device=device), torch.randn(k, device=device)
    for eps in (1e-5, 1e-12):
        y, _, rstd = run(kind, x, gamma, beta, eps, SAVE)
        want, _, want_rstd = reference(kind, x.double(), gamma.double(), beta.double(), eps, False)
        for i in range(len(rows)):
            assert relative_error(y[i], want[i]) < (1e-3 if i == 0 else 1e-5), i
            assert relative_error(rstd[i], want_rstd[i]) < 1e-4, i
    x16 = torch.full((2, k), 60000.0, device=device, dtype=torch.float16)
    x16[0, ::2] = -60000
    y, *_ = run(kind, x16, gamma.half(), beta.half(), 1e-5, 0)
    assert torch.isfinite(y).all()


@KIND
def test_gradients_of_vectors_are_deterministic(kind: str, device: torch.device) -> None:
    for m, k in ((3000, 256), (700, 1000), (600, 5)):
        dy, x = (torch.randn(m, k, device=device).bfloat16() for _ in range(2))
        gamma = torch.randn(k, device=device)
        _, mean, rstd = run(kind, x, gamma, gamma, 1e-5, SAVE)
        first = backward(kind, dy, x, gamma, mean, rstd, GRADS)
        for _ in range(3):
            again = backward(kind, dy, x, gamma, mean, rstd, GRADS)
            assert all(a is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))


@KIND
def test_each_output_alone(kind: str, device: torch.device) -> None:
    dy, x = (torch.randn(33, 48, device=device).bfloat16() for _ in range(2))
    gamma = torch.randn(48, device=device)
    _, mean, rstd = run(kind, x, gamma, gamma, 1e-5, SAVE)
    every = backward(kind, dy, x, gamma, mean, rstd, GRADS)
    for needs in range(8):
        for got, want, need in zip(
            backward(kind, dy, x, gamma, mean, rstd, needs << 1), every, (1, 2, 4), strict=True
        ):
            assert (got is None) == (want is None or not needs & need)
            assert got is None or torch.equal(got, want)


def test_rows_of_nothing(device: torch.device) -> None:
    x, gamma = torch.randn(4, 0, device=device), torch.randn(0, device=device)
    y, mean, rstd = ops.layernorm_fwd(x, gamma, gamma, 0.25, SAVE)
    assert y.shape == (4, 0)
    assert torch.equal(mean, torch.zeros_like(mean))
    assert torch.equal(rstd, torch.full_like(rstd, 2.0))


@KIND
@DTYPE
def test_unaligned_and_strided(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    base = torch.randn(20, 131, device=device).to(dtype)
    gamma, beta = (torch.randn(128, device=device) for _ in range(2))
    for x in (base[:, 3:], base[:, :128], base.t()[:128].t(), base.view(-1)[1 : 1 + 19 * 128].view(19, 128)):
        y, *_ = run(kind, x, gamma, beta, 1e-5, 0)
        want, *_ = run(kind, x.contiguous().clone(), gamma, beta, 1e-5, 0)
        assert relative_error(y, want) < TOLERANCE[dtype]


@pytest.mark.full
@KIND
@pytest.mark.parametrize("k", [16384, 20000, 32768, 70000])
def test_wide(kind: str, k: int, device: torch.device) -> None:
    test_against_float64(kind, torch.bfloat16, k, False, device)
    test_against_float64(kind, torch.float32, k, True, device)
