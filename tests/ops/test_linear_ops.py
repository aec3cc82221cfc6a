"""The linear operators: numerics against float64, layouts, degenerate sizes, large sizes."""

from __future__ import annotations

import pytest
import te_ops  # noqa: F401
import torch
from cases import rand
from helpers import poisoned, relative_error, size_of_product, tolerance

fwd = torch.ops.te_ops.linear_fwd.default
bwd = torch.ops.te_ops.linear_bwd.default
wgrad = torch.ops.te_ops.linear_wgrad.default

SHAPES = [
    (128, 128, 128),
    (31, 127, 65),
    (1, 100, 128),
    (129, 64, 64),
    (2, 1, 64),
    (16, 64, 32),
    (17, 33, 5),
    (130, 257, 101),
    (24, 4096, 16),
    (300, 2, 300),
    (64, 16384, 8),
]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_against_float64(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    x, w, b = (rand(*s, dtype=dtype, device=device) for s in ((m, k), (n, k), (n,)))
    dy = rand(m, n, dtype=dtype, device=device)
    with poisoned(device, m * n, m * k, n * k, n):
        y = fwd(x, w, b)
        dx, dw, db = bwd(dy, x, w, 7)
    x64, w64, b64, dy64 = (t.double() for t in (x, w, b, dy))
    ones = torch.ones(1, m, dtype=torch.float64, device=device)
    for got, a, b_, more, length in (
        (y, x64, w64.t(), b64, k),
        (dx, dy64, w64, 0, n),
        (dw, dy64.t(), x64, 0, m),
        (db[None], ones, dy64, 0, m),
    ):
        assert relative_error(got, a @ b_ + more, size_of_product(a, b_)) < tolerance(dtype, length)


@pytest.mark.parametrize("m", [1, 31, 1000, 20000])
def test_bias_gradient_sums_in_fp32(m: int, dtype: torch.dtype, device: torch.device) -> None:
    """All of one sign, so that a sum in bf16 would stop growing."""
    dy = rand(m, 24, dtype=dtype, device=device).abs() + 1
    (_, _, db) = bwd(dy, None, None, 4)
    assert relative_error(db, dy.double().sum(0)) < tolerance(dtype, m)


@pytest.mark.parametrize("grads", range(8))
def test_each_subset_of_gradients(grads: int, device: torch.device) -> None:
    dy, x, w = (rand(*s, dtype=torch.float32, device=device) for s in ((6, 4), (6, 3), (4, 3)))
    everything = bwd(dy, x, w, 7)
    some = bwd(dy, x if grads & 2 else None, w if grads & 1 else None, grads)
    for bit, (got, want) in enumerate(zip(some, everything, strict=True)):
        assert (got is not None) == bool(grads >> bit & 1)
        if got is not None:
            assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_wgrad_into_main_grad(
    accumulate: bool, grad_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> None:
    m, k, n = 48, 40, 24
    dy, x = rand(m, n, dtype=dtype, device=device), rand(m, k, dtype=dtype, device=device)
    grad = rand(n, k, dtype=grad_dtype or dtype, device=device)
    if not accumulate:
        grad.fill_(float("nan"))  # beta = 0 must not read it
    want = dy.double().t() @ x.double() + (grad.double() if accumulate else 0)
    assert wgrad(dy, x, grad, accumulate) is None
    assert relative_error(grad, want) < tolerance(grad.dtype, m)


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in other memory."""
    m, k = t.shape
    wide = torch.zeros(m, k + 3, dtype=t.dtype, device=t.device)
    wide[:, 1 : k + 1] = t
    tall = torch.zeros(2 * m, k, dtype=t.dtype, device=t.device)
    tall[::2] = t
    spaced = torch.zeros(m, 2 * k, dtype=t.dtype, device=t.device)
    spaced[:, ::2] = t
    shifted = torch.zeros(m * k + 1, dtype=t.dtype, device=t.device)
    shifted[1:] = t.flatten()
    return {
        "transposed": t.t().contiguous().t(),
        "sliced": wide[:, 1 : k + 1],
        "every other row": tall[::2],
        "every other column": spaced[:, ::2],
        "misaligned": shifted[1:].view(m, k),
    }


def test_layouts_equal_contiguous(dtype: torch.dtype, device: torch.device) -> None:
    m, k, n = 24, 40, 16
    x, w, dy = (rand(*s, dtype=dtype, device=device) for s in ((m, k), (n, k), (m, n)))
    b = rand(2 * n, dtype=dtype, device=device)[::2]
    want = [fwd(x, w, b.contiguous()), *bwd(dy, x, w, 7)]
    # Another layout may take another kernel, with another order of sums; nothing else may differ.
    limit = 2 * tolerance(dtype, k)
    for name in layouts(x):
        got = [fwd(layouts(x)[name], w, b), *bwd(layouts(dy)[name], layouts(x)[name], w, 7)]
        got_w = [fwd(x, layouts(w)[name], b), *bwd(dy, x, layouts(w)[name], 7)]
        for g, h, r in zip(got, got_w, want, strict=True):
            assert g.is_contiguous(), name
            assert relative_error(g, r) < limit, name
            assert relative_error(h, r) < limit, name


def test_expanded_operands(dtype: torch.dtype, device: torch.device) -> None:
    """Stride 0, as the gradient of .sum() and a broadcast input have it: copied, so equal to the bit."""
    m, k, n = 12, 20, 8
    w = rand(n, k, dtype=dtype, device=device)
    x = rand(k, dtype=dtype, device=device).expand(m, k)
    dy = rand(1, 1, dtype=dtype, device=device).expand(m, n)
    assert torch.equal(fwd(x, w, None), fwd(x.contiguous(), w, None))
    for got, want in zip(bwd(dy, x, w, 7), bwd(dy.contiguous(), x.contiguous(), w, 7), strict=True):
        assert torch.equal(got, want)


def test_leading_dims_that_do_not_flatten(device: torch.device) -> None:
    x = rand(4, 6, 5, dtype=torch.float32, device=device).transpose(0, 1)
    w = rand(3, 5, dtype=torch.float32, device=device)
    assert torch.equal(fwd(x, w, None), fwd(x.contiguous(), w, None))


def test_degenerate_sizes(dtype: torch.dtype, device: torch.device) -> None:
    def t(*shape: int) -> torch.Tensor:
        return rand(*shape, dtype=dtype, device=device)

    b = t(4)
    with poisoned(device, 12, 4, 32):
        assert fwd(t(0, 8), t(4, 8), b).shape == (0, 4)
        assert torch.equal(fwd(t(3, 0), t(4, 0), b), b.expand(3, 4))
        assert torch.equal(fwd(t(3, 0), t(4, 0), None), torch.zeros(3, 4, dtype=dtype, device=device))
        assert fwd(t(3, 8), t(0, 8), t(0)).shape == (3, 0)
        dx, dw, db = bwd(t(0, 4), t(0, 8), t(4, 8), 7)
        assert dx.shape == (0, 8)
        assert torch.equal(dw, torch.zeros(4, 8, dtype=dtype, device=device))
        assert torch.equal(db, torch.zeros(4, dtype=dtype, device=device))
        dx, dw, db = bwd(t(3, 0), t(3, 8), t(0, 8), 7)
        assert torch.equal(dx, torch.zeros(3, 8, dtype=dtype, device=device))
        assert (dw.shape, db.shape) == ((0, 8), (0,))
        grad = t(4, 8)
        kept = grad.clone()
        wgrad(t(0, 4), t(0, 8), grad, True)
        assert torch.equal(grad, kept)
        wgrad(t(0, 4), t(0, 8), grad, False)
        assert torch.equal(grad, torch.zeros_like(grad))


def test_nan_and_inf_reach_the_output(dtype: torch.dtype, device: torch.device) -> None:
    x, w = rand(8, 16, dtype=dtype, device=device), rand(4, 16, dtype=dtype, device=device)
    x[2, 3] = float("nan")
    x[5, 1] = float("inf")
    y = fwd(x, w, None)
    assert y[2].isnan().all()
    assert not y[5].isfinite().any()
    assert y[[0, 1, 3, 4, 6, 7]].isfinite().all()


def test_repeatable(dtype: torch.dtype, device: torch.device) -> None:
    dy, x, w = (rand(*s, dtype=dtype, device=device) for s in ((513, 129), (513, 257), (129, 257)))
    first = [fwd(x, w, None), *bwd(dy, x, w, 7)]
    for _ in range(5):
        for a, b in zip([fwd(x, w, None), *bwd(dy, x, w, 7)], first, strict=True):
            assert torch.equal(a, b)


def test_cuda_agrees_with_cpu(dtype: torch.dtype, cuda: torch.device) -> None:
    dy, x, w, b = (
        rand(*s, dtype=dtype, device=torch.device("cpu")) for s in ((70, 50), (70, 90), (50, 90), (50,))
    )
    want = [fwd(x, w, b), *bwd(dy, x, w, 7)]
    got = [fwd(x.cuda(), w.cuda(), b.cuda()), *bwd(dy.cuda(), x.cuda(), w.cuda(), 7)]
    for g, r in zip(got, want, strict=True):
        assert relative_error(g, r) < 2 * tolerance(dtype, 90)


def test_tf32_follows_pytorch(cuda: torch.device) -> None:
    x, w = rand(256, 512, dtype=torch.float32, device=cuda), rand(128, 512, dtype=torch.float32, device=cuda)
    want = x.double() @ w.double().t()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        exact = relative_error(fwd(x, w, None), want)
        torch.backends.cuda.matmul.allow_tf32 = True
        rounded = relative_error(fwd(x, w, None), want)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert exact < 1e-6
    assert 1e-5 < rounded < 1e-3


@pytest.mark.full
def test_more_than_2_31_elements(cuda: torch.device) -> None:
    rows = (1 << 31) // 64 + 5
    x = torch.randn(rows, 64, dtype=torch.bfloat16, device=cuda)
    w = rand(64, 64, dtype=torch.bfloat16, device=cuda)
    y = fwd(x, w, None)
    assert relative_error(y[-3:], x[-3:].double() @ w.double().t()) < tolerance(torch.bfloat16, 64)
    _, _, db = bwd(x, None, None, 4)
    assert relative_error(db + 1e4, x.sum(0, dtype=torch.float64) + 1e4) < 1e-2
