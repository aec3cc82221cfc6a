"""The activation operators against torch's functions in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import DTYPES, TOLERANCE, relative_error
from torch import Tensor
from torch.nn import functional as F

ops = torch.ops.te_ops
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
LIMIT, ALPHA, OFFSET = 1.5, 1.702, 1.0
PARAMETERS = LIMIT, ALPHA, OFFSET


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def clamped(x: Tensor) -> Tensor:
    x = x.clamp(max=LIMIT)
    return x * torch.sigmoid(ALPHA * x)


def clamped_gate(x: Tensor) -> Tensor:
    return x.clamp(-LIMIT, LIMIT) + OFFSET


# In the order of TE_ACTIVATIONS: what f is, and what becomes of the gate (None: there is none).
Function = Callable[[Tensor], Tensor]
KINDS: list[tuple[str, Function, Function | None]] = [
    ("gelu", gelu, None),
    ("geglu", gelu, lambda g: g),
    ("glu", torch.sigmoid, lambda g: g),
    ("qgelu", qgelu, None),
    ("qgeglu", qgelu, lambda g: g),
    ("relu", F.relu, None),
    ("reglu", F.relu, lambda g: g),
    ("srelu", srelu, None),
    ("sreglu", srelu, lambda g: g),
    ("silu", F.silu, None),
    ("swiglu", F.silu, lambda g: g),
    ("clamped_swiglu", clamped, clamped_gate),
]
KIND = pytest.mark.parametrize("kind", range(len(KINDS)), ids=[k[0] for k in KINDS])


def reference(kind: int, x: Tensor) -> Tensor:
    _, f, gate = KINDS[kind]
    if gate is None:
        return f(x)
    a, g = x.chunk(2, dim=-1)
    return f(a) * gate(g)


def forward(kind: int, x: Tensor) -> Tensor:
    op = ops.activation_fwd if KINDS[kind][2] is None else ops.gated_fwd
    y: Tensor = op(x, kind, *PARAMETERS)
    return y


def backward(kind: int, dy: Tensor, x: Tensor) -> Tensor:
    op = ops.activation_bwd if KINDS[kind][2] is None else ops.gated_bwd
    dx: Tensor = op(dy, x, kind, *PARAMETERS)
    return dx


@KIND
@DTYPE
@pytest.mark.parametrize("width", [1, 3, 8, 64, 100])
def test_against_float64(kind: int, dtype: torch.dtype, width: int, device: torch.device) -> None:
    gated = KINDS[kind][2] is not None
    x = (2 * torch.randn(5, 7, width * (1 + gated), device=device)).to(dtype)
    x[x.abs() == LIMIT] = 0.25  # there the derivative of a clamp is a matter of taste
    dy = torch.randn(5, 7, width, device=device).to(dtype)
    x64 = x.double().requires_grad_()
    want = reference(kind, x64)
    want.backward(dy.double())
    limit = TOLERANCE[dtype] * (2 if dtype == torch.float32 else 1)
    assert relative_error(forward(kind, x), want) < limit
    assert relative_error(backward(kind, dy, x), x64.grad) < limit


@KIND
def test_far_out(kind: int, device: torch.device) -> None:
    """Where the functions are flat or straight, and where they are not finite."""
    values = torch.tensor(
        [-float("inf"), -1e30, -200.0, -60.0, -0.0, 0.0, 60.0, 200.0, float("inf")], device=device
    )
    gated = KINDS[kind][2] is not None
    x = torch.cat([values, torch.ones_like(values)]) if gated else values
    y = forward(kind, x[None])[0]
    slope = backward(kind, torch.ones_like(values)[None], x[None])[0][: len(values)]
    assert not torch.isnan(y).any()
    assert not torch.isnan(slope).any()
    assert (y[:3].abs() < 1e-20).all()
    nan = torch.full((1, 2 if gated else 1), float("nan"), device=device)
    assert torch.isnan(forward(kind, nan)).all()


def test_clamps(device: torch.device) -> None:
    """Gradients are 0 where something is clamped, and not at the limit itself."""
    a = torch.tensor([LIMIT - 0.5, LIMIT, LIMIT + 0.5, -LIMIT - 0.5], device=device)
    g = torch.tensor([LIMIT + 1, LIMIT, -LIMIT, -LIMIT - 1], device=device)
    x64 = torch.cat([a, g])[None].double().requires_grad_()
    want = reference(11, x64)
    want.sum().backward()
    x, dy = torch.cat([a, g])[None], torch.ones(1, 4, device=device)
    assert relative_error(forward(11, x), want) < 1e-6
    got = backward(11, dy, x)[0]
    beyond = torch.cat([a, g]).abs() != LIMIT
    assert relative_error(got[beyond], x64.grad[0][beyond]) < 1e-6
    assert (got == 0).tolist() == [False, False, True, False, True, False, False, True]


@DTYPE
def test_unaligned_and_strided(dtype: torch.dtype, device: torch.device) -> None:
    base = torch.randn(20, 131, device=device).to(dtype)
    for x in (base[:, 3:], base[:, :128], base.t()[:128].t(), base.view(-1)[1 : 1 + 19 * 128].view(19, 128)):
        for kind in (9, 10):
            assert torch.equal(forward(kind, x), forward(kind, x.contiguous().clone()))


def test_messages(device: torch.device) -> None:
    x = torch.randn(2, 6, device=device)
    with pytest.raises(
        RuntimeError, match=r"activation_fwd: kind = 10: must be one of 0 \(gelu\), 3 \(qgelu\)"
    ):
        ops.activation_fwd(x, 10, *PARAMETERS)
    with pytest.raises(RuntimeError, match=r"gated_fwd: kind = 99: must be one of 1 \(geglu\)"):
        ops.gated_fwd(x, 99, *PARAMETERS)
    with pytest.raises(RuntimeError, match="x has rows of 5: they must have two halves"):
        ops.gated_fwd(x[:, :5], 10, *PARAMETERS)
    assert ops.gated_fwd(x, 10, *PARAMETERS).shape == (2, 3)
