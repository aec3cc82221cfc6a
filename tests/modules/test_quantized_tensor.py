"""QuantizedTensor in the place of a tensor."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import compiled
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = pytest.mark.parametrize("codes", [E4M3, E5M2], ids=["e4m3", "e5m2"])
COPIES = pytest.mark.parametrize(("row", "col"), [(True, False), (False, True), (True, True)])


def same(a: Any, b: Any) -> bool:
    """Type, nominal dtype, codes and scale, to the bit."""
    if not (isinstance(a, te.QuantizedTensor) and isinstance(b, te.QuantizedTensor)):
        return False
    pairs = [(a.row, b.row), (a.col, b.col), (a.scale_inv, b.scale_inv)]
    return a.shape == b.shape and all(
        (x is None) == (y is None) and (x is None or torch.equal(x.view(torch.uint8), y.view(torch.uint8)))
        for x, y in pairs
    )


@BOTH
@COPIES
def test_values(codes: torch.dtype, row: bool, col: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 5, 8, device=device, dtype=dtype)
    q = te.quantize(x, dtype=codes, row=row, col=col)
    assert (q.shape, q.dtype, q.device, q.codes_dtype) == (x.shape, dtype, x.device, codes)
    scale = torch.tensor({E4M3: 448.0, E5M2: 57344.0}[codes], device=device) / x.abs().max().float()
    want = ((x.float() * scale).clamp(-57344, 57344).to(codes).float() * (1 / scale)).to(dtype)
    assert torch.equal(q.dequantize(), want)
    assert q.dequantize(torch.float32).dtype == torch.float32
    assert torch.equal(q + 1, want + 1)
    assert "row" in repr(q) or "col" in repr(q)


@COPIES
def test_what_stays_quantized(row: bool, col: bool, device: torch.device) -> None:
    q = te.quantize(torch.randn(4, 6, 8, device=device, dtype=torch.bfloat16), row=row, col=col)
    for other in (q.clone(), q.detach(), copy.deepcopy(q), q.to(device)):
        assert same(other, q)
    half = q.half()
    assert isinstance(half, te.QuantizedTensor)
    assert (half.dtype, half.scale_inv.dtype) == (torch.float16, torch.float32)
    flat = q.view(24, 8)
    assert flat.shape == (24, 8)
    assert torch.equal(torch.as_tensor(flat.dequantize() if row else flat), q.dequantize().view(24, 8))
    assert isinstance(flat, te.QuantizedTensor) == row
    assert not isinstance(q.view(4, 48), te.QuantizedTensor)
    for plain in (
        torch.zeros_like(q),
        torch.empty_like(q),
        q.new_zeros(3),
        q * 2,
        q.t() if q.ndim == 2 else q[0],
    ):
        assert type(plain) is Tensor
        assert plain.dtype == torch.bfloat16


@COPIES
def test_writes(row: bool, col: bool, device: torch.device) -> None:
    q = te.quantize(torch.randn(4, 8, device=device), row=row, col=col)
    memory = [t.data_ptr() for t in (q.row, q.col, q.scale_inv) if t is not None]
    new = torch.randn(4, 8, device=device) * 100
    q.copy_(new)
    assert same(q, te.quantize(new, row=row, col=col))
    q.add_(1)
    assert same(q, te.quantize(te.quantize(new).dequantize() + 1, row=row, col=col))
    q.zero_()
    assert not q.dequantize().any()
    source = te.quantize(new, row=True)
    q.copy_(source)
    assert torch.equal(q.dequantize(), source.dequantize())
    assert torch.equal(torch.empty(4, 8, device=device).copy_(source), source.dequantize())
    assert memory == [t.data_ptr() for t in (q.row, q.col, q.scale_inv) if t is not None]


def test_update_usage(device: torch.device) -> None:
    q = te.quantize(torch.randn(4, 8, device=device))
    values = q.dequantize()
    q.update_usage(columnwise=True)
    assert torch.equal(q.col.view(torch.uint8), q.row.view(torch.uint8).t())
    q.update_usage(rowwise=False)
    assert q.row is None
    assert torch.equal(q.dequantize(), values)
    with pytest.raises(ValueError, match="would leave neither row nor col"):
        q.update_usage(columnwise=False)
    assert torch.equal(q.dequantize(), values)


def test_bad_buffers(device: torch.device) -> None:
    q = te.quantize(torch.randn(4, 8, device=device), col=True)
    make = te.QuantizedTensor
    cases: list[tuple[str, Any]] = [
        ("row and col are None", lambda: make(None, None, q.scale_inv, dtype=torch.float32)),
        (
            "codes have dtype torch.float32",
            lambda: make(q.dequantize(), None, q.scale_inv, dtype=torch.float32),
        ),
        ("dtype=torch.int32", lambda: make(q.row, None, q.scale_inv, dtype=torch.int32)),
        (r"scale_inv is torch.float32 \[\]", lambda: make(q.row, None, q.scale_inv[0], dtype=torch.float32)),
        (
            "col is torch.float8_e4m3fn \\[4, 8\\]",
            lambda: make(q.row, q.row, q.scale_inv, dtype=torch.float32),
        ),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        te.quantize(q.dequantize(), dtype=torch.int8)


@pytest.mark.parametrize("weights_only", [True, False])
def test_files(weights_only: bool, device: torch.device) -> None:
    module = nn.Module()
    module.w = nn.Parameter(te.quantize(torch.randn(4, 8, device=device), col=True))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert same(loaded["w"], module.w)
    twin = copy.deepcopy(module)
    twin.w.data.zero_() if not isinstance(twin.w, te.QuantizedTensor) else twin.w.detach().zero_()
    twin.load_state_dict(loaded)
    assert torch.equal(twin.w.dequantize(), module.w.dequantize())
    assert isinstance(twin.w, nn.Parameter)
    assert list(dict(twin.named_parameters())) == ["w"]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers(make: Any, foreach: bool, device: torch.device) -> None:
    """A step is: dequantize, update, quantize again."""
    w = nn.Parameter(te.quantize(torch.randn(8, 16, device=device)))
    plain = nn.Parameter(w.dequantize())
    optimizers = [make([p], lr=0.05, foreach=foreach) for p in (w, plain)]
    grad = torch.randn(8, 16, device=device)
    w.grad, plain.grad = grad.clone(), grad.clone()
    for o in optimizers:
        o.step()
    assert isinstance(w, te.QuantizedTensor)
    assert all(type(t) is Tensor for t in optimizers[0].state[w].values() if isinstance(t, Tensor))
    assert (w.dequantize() - plain).norm() < 0.06 * plain.norm()  # each in-place operation rounds once


def test_master_weights(device: torch.device) -> None:
    w = nn.Parameter(te.quantize(torch.randn(8, 16, device=device)))
    master = torch.randn(8, 16, device=device)
    with torch.no_grad():
        w.copy_(master)
    assert same(w.detach(), te.quantize(master))


def test_compiled(device: torch.device) -> None:
    q = te.quantize(torch.randn(8, 16, device=device), col=True)

    def f(t: Any) -> Tensor:
        return t.dequantize() * 2 + torch.ops.te_ops.dequantize(t.row, t.scale_inv, 2)

    fn, count = compiled(f, "aot_eager")
    for _ in range(2):
        assert torch.equal(fn(q), f(q))
    assert count.frame_count == 1


def test_no_rows(device: torch.device) -> None:
    for shape in ((0, 8), (4, 0)):
        q = te.quantize(torch.randn(shape, device=device), col=True)
        assert q.dequantize().shape == shape
        assert q.scale_inv.item() == 1.0
