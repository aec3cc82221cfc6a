"""The quantizer operators, bit for bit: against their definition, Transformer Engine, and CUDA against the CPU."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from helpers import reference_vectors
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMATS = pytest.mark.parametrize("codes", [E4M3, E5M2], ids=["e4m3", "e5m2"])
ops = torch.ops.te_ops
E5M2_FLAG, POW2, ROW, COL, AMAX, SUMS = (1 << i for i in range(6))

DATA = reference_vectors()


def digest(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def raw(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.cpu().view(torch.uint8)


def quantize(
    x: Tensor, codes: torch.dtype, scale: Tensor | None = None, options: int = ROW | COL | AMAX
) -> Any:
    return ops.quantize(x, scale, options | (E5M2_FLAG if codes == E5M2 else 0))


def encode(values: Tensor, codes: torch.dtype) -> Tensor:
    """float64 values to codes by search among all of them: nearest, ties to even, saturating."""
    table = torch.arange(128, dtype=torch.uint8).view(codes).double()
    finite = table.isfinite().nonzero().flatten()
    grid = table[finite]
    magnitude = values.abs().clamp(max=LARGEST[codes])
    upper = torch.searchsorted(grid, magnitude).clamp(max=len(grid) - 1)
    lower = (upper - 1).clamp(min=0)
    down, up = magnitude - grid[lower], grid[upper] - magnitude
    choose_upper = (up < down) | ((up == down) & (upper % 2 == 0))
    code = torch.where(choose_upper, upper, lower).to(torch.uint8)
    code = code | ((values.signbit()).to(torch.uint8) << 7)
    return torch.where(values.isnan(), torch.full_like(code, 0x7F), code)


@pytest.mark.parametrize("name", sorted(DATA["quant"]))
def test_bits_of_transformer_engine(name: str, device: torch.device) -> None:
    kind, fmt, option = name.split("/")[0].split("_")
    want = DATA["quant"][name]
    codes = E5M2 if fmt == "e5m2" else E4M3
    scale = torch.tensor([float(option)], device=device) if kind == "scaled" else None
    pow2 = POW2 if option == "pow21" else 0
    row, col, scale_inv, amax, _ = quantize(
        DATA["inputs"][name.split("/")[1]].to(device), codes, scale, ROW | COL | AMAX | pow2
    )
    assert digest(row) == want["row"]
    assert digest(col) == want.get("col", digest(row.view(torch.uint8).t()))
    assert torch.equal(scale_inv.cpu(), want["scale_inv"])
    assert torch.equal(amax.cpu(), want.get("amax", amax.cpu()))


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e-4, 1.0e4])
def test_every_bf16_value(codes: torch.dtype, scale: float, device: torch.device) -> None:
    """All 65536 of them: NaNs, infinities, zeros, subnormals and everything that saturates."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    row, col, scale_inv, amax, _ = quantize(x.to(device), codes, torch.tensor([scale], device=device))
    product = x.float() * torch.tensor(scale)  # in fp32, as the rule says
    want = encode(product.double(), codes)
    assert torch.equal(raw(row), want)
    assert torch.equal(raw(col), want.t())
    assert torch.equal(scale_inv.cpu(), 1 / torch.tensor([scale]))
    assert amax.item() == float("inf")


@FORMATS
def test_every_code_round_trips(codes: torch.dtype, device: torch.device) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    one = torch.ones(1, device=device)
    for dtype in range(3):
        values = ops.dequantize(every.view(codes).to(device), one, dtype)
        assert torch.equal(
            values.cpu().double().nan_to_num(7e77), every.view(codes).double().nan_to_num(7e77)
        )
        back = quantize(values, codes, one)[0]
        is_nan = every.view(codes).float().isnan()
        is_inf = every.view(codes).float().isinf()
        want = torch.where(is_nan, 0x7F, torch.where(is_inf, every - 1, every)).to(torch.uint8)
        assert torch.equal(raw(back), want)


@FORMATS
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1e-36, 3.4e38, float("inf")])
def test_scale_rules(codes: torch.dtype, amax: float, device: torch.device) -> None:
    x = torch.zeros(3, 5)
    x[1, 2], x[2, 4] = -amax, float("nan")
    row, _, scale_inv, found, _ = quantize(x.to(device), codes)
    amax32 = torch.tensor(amax)
    scale = torch.tensor(LARGEST[codes]) / amax32
    if amax32 == 0 or amax32.isinf():
        scale = torch.tensor(1.0)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    assert torch.equal(found.cpu(), amax32[None])
    assert torch.equal(scale_inv.cpu(), 1 / scale[None])
    assert torch.equal(raw(row), encode((x * scale).double(), codes))


def test_all_nan_and_empty(device: torch.device) -> None:
    for x in (torch.full((4, 4), float("nan")), torch.empty(0, 7), torch.empty(3, 0)):
        row, col, scale_inv, amax, _ = quantize(x.to(device), E4M3)
        assert (scale_inv.item(), amax.item()) == (1.0, 0.0)
        assert row.shape == x.shape
        assert col.shape == x.shape[::-1]


SHAPES = [
    (1, 1),
    (3, 5),
    (127, 129),
    (128, 128),
    (144, 272),
    (16, 24),
    (257, 40),
    (1, 1000),
    (1000, 1),
    (130, 4096),
]


@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_cuda_has_the_bits_of_the_cpu(
    shape: tuple[int, int], layout: str, codes: torch.dtype, dtype: torch.dtype, cuda: torch.device
) -> None:
    x = torch.randn(shape) * torch.logspace(-6, 6, shape[1])
    x.view(-1)[torch.randint(x.numel(), (2,))] = torch.tensor([float("nan"), 0.0])
    x = x.to(dtype)
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "sliced":
        x = torch.cat([x, torch.full((shape[0], 3), 7.0, dtype=dtype)], 1)[:, : shape[1]]
    scale = torch.tensor([0.7])
    for given in (None, scale):
        for options in (
            ROW | AMAX,
            COL | AMAX,
            ROW | COL | AMAX,
            ROW | COL | AMAX | POW2,
            ROW | COL | AMAX | SUMS,
        ):
            want = quantize(x, codes, given, options)
            got = quantize(x.to(cuda), codes, None if given is None else given.to(cuda), options)
            for g, w in zip(got[:4], want[:4], strict=True):
                assert (g is None) == (w is None)
                assert g is None or torch.equal(raw(g), raw(w))
            if options & SUMS and not x.isnan().any():
                assert torch.allclose(
                    got[4].cpu().float(), want[4].float(), rtol=1e-2, atol=1e-2, equal_nan=True
                )
    assert torch.equal(ops.amax(x.to(cuda)).cpu(), ops.amax(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_moves_codes_as_the_cpu(shape: tuple[int, int], cuda: torch.device) -> None:
    codes = torch.randint(256, shape, dtype=torch.uint8).view(E4M3)
    assert torch.equal(raw(ops.transpose_codes(codes.to(cuda))), raw(codes).t())
    for dtype in range(3):
        one = torch.tensor([0.3])
        want, got = ops.dequantize(codes, one, dtype), ops.dequantize(codes.to(cuda), one.to(cuda), dtype)
        assert torch.equal(got.cpu().nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("shape", [(300, 200), (257, 33)], ids=str)
def test_sums_on_the_way(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, dtype=dtype, device=device)
    sums = quantize(x, E5M2, None, ROW | COL | SUMS)[4]
    want = x.double().sum(0)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert (sums.double() - want).abs().max() < limit * want.abs().max() + limit


def test_quantize_into_keeps_memory(device: torch.device) -> None:
    x = torch.randn(24, 40, device=device)
    row = torch.zeros(24, 40, device=device).to(E4M3)
    col, scale_inv = torch.zeros(40, 24, device=device).to(E4M3), torch.zeros(1, device=device)
    ops.quantize_into(x, None, row, col, scale_inv, False)
    want = quantize(x, E4M3)
    assert torch.equal(raw(row), raw(want[0]))
    assert torch.equal(raw(col), raw(want[1]))
    assert torch.equal(scale_inv, want[2])


@pytest.mark.full
def test_more_than_2_to_the_31_elements(cuda: torch.device) -> None:
    x = torch.ones(70000, 32768, dtype=torch.bfloat16, device=cuda)
    x[-1] = 3.0
    row, col, scale_inv, amax, _ = quantize(x, E4M3)
    assert amax.item() == 3.0
    assert (row[-1].float() * scale_inv).eq(3.0).all()
    assert (col[:, -1].float() * scale_inv).eq(3.0).all()
    assert (row[-2].float() * scale_inv - 1.0).abs().max() < 0.04
