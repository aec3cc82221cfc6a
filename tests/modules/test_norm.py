"""LayerNorm and RMSNorm as modules: torch.nn's numbers and state dicts, compiled, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import DTYPES, TOLERANCE, assert_same_bits, compiled, relative_error
from torch import Tensor, nn

KINDS = pytest.mark.parametrize(
    ("ours", "theirs"), [(te.LayerNorm, nn.LayerNorm), (te.RMSNorm, nn.RMSNorm)], ids=["layer", "rms"]
)


def filled(module: Any) -> Any:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


def step(module: Any, run: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = run(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]  # type: ignore[list-item]


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [48, (3, 16)], ids=str)
def test_against_torch(ours: Any, theirs: Any, dtype: torch.dtype, shape: Any, device: torch.device) -> None:
    other = filled(theirs(shape, eps=1e-5, device=device, dtype=dtype))
    module = ours(shape, device=device, dtype=dtype)
    module.load_state_dict(other.state_dict(), strict=True)
    dims = (shape,) if isinstance(shape, int) else shape
    x, dy = (torch.randn(5, 7, *dims, device=device).to(dtype) for _ in range(2))
    double = copy.deepcopy(other).double()
    want = step(double, double, x.double(), dy.double())
    for got, w in zip(step(module, module, x, dy), want, strict=True):
        assert got.dtype == dtype
        assert relative_error(got, w) < 2 * TOLERANCE[dtype]
    theirs(shape, eps=1e-5, device=device, dtype=dtype).load_state_dict(module.state_dict(), strict=True)


@KINDS
def test_zero_centered(ours: Any, theirs: Any, device: torch.device) -> None:
    fresh = ours(32, zero_centered_gamma=True, device=device)
    assert not fresh.weight.any()
    x = torch.randn(4, 32, device=device)
    assert torch.equal(fresh(x), ours(32, device=device)(x))
    assert torch.equal(ours(32, device=device).weight, torch.ones(32, device=device))


@KINDS
def test_compiled(ours: Any, theirs: Any, device: torch.device, backend: str) -> None:
    eager = filled(ours(48, device=device))
    other = copy.deepcopy(eager)
    fn, count = compiled(other, backend)
    for rows in (8, 8, 5, 31, 7):  # one graph for the first size, one for all others
        x, dy = torch.randn(rows, 48, device=device), torch.randn(rows, 48, device=device)
        assert_same_bits(step(other, fn, x, dy), step(eager, eager, x, dy))
    assert count.frame_count == 2
    with torch.no_grad():
        x = torch.randn(6, 48, device=device)
        assert torch.equal(fn(x), eager(x))


@KINDS
def test_every_subset_of_gradients(ours: Any, theirs: Any, device: torch.device) -> None:
    module = filled(ours(24, device=device))
    x, dy = torch.randn(9, 24, device=device), torch.randn(9, 24, device=device)
    want = step(module, module, x, dy)[1:]
    leaves = [None, *module.parameters()]
    for needs in range(1, 1 << len(leaves)):
        inp = x.clone().requires_grad_(bool(needs & 1))
        for i, p in enumerate(module.parameters()):
            p.grad = None
            p.requires_grad_(bool(needs >> (i + 1) & 1))
        module(inp).backward(dy)
        for i, (leaf, w) in enumerate(zip([inp, *module.parameters()], want, strict=True)):
            assert (leaf.grad is not None) == bool(needs >> i & 1)
            assert leaf.grad is None or torch.equal(leaf.grad, w)


@KINDS
def test_parameters_of_another_dtype(ours: Any, theirs: Any, device: torch.device) -> None:
    """fp32 parameters under bf16 activations, with and without AMP, which changes nothing."""
    module = filled(ours(40, device=device, dtype=torch.float32))
    x, dy = (torch.randn(6, 40, device=device).bfloat16() for _ in range(2))
    plain = step(module, module, x, dy)
    assert [t.dtype for t in plain[:3]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    with torch.autocast(device.type, torch.bfloat16):
        amp = step(module, module, x, dy)
    assert_same_bits(amp, plain)


@KINDS
def test_errors(ours: Any, theirs: Any, device: torch.device) -> None:
    name = ours.__name__
    for kwargs, text in (
        ({"normalized_shape": -1}, "normalized_shape=-1"),
        ({"normalized_shape": ()}, r"normalized_shape=\(\)"),
        ({"normalized_shape": 8, "eps": -1.0}, "eps=-1.0"),
        ({"normalized_shape": 8, "dtype": torch.int8}, "dtype=torch.int8"),
        ({"normalized_shape": 8, "sequence_parallel": True}, "sequence_parallel=True"),
    ):
        with pytest.raises(ValueError, match=f"te_ops.{name}: {text}"):
            ours(**kwargs)
    module = ours(8, device=device)
    with pytest.raises(RuntimeError, match=r"inp has shape \[4, 9\]: its last dims must be \[8\]"):
        module(torch.randn(4, 9, device=device))
    with pytest.raises(RuntimeError, match="x"):
        module(torch.ones(4, 8, device=device, dtype=torch.int32))
    assert module(torch.randn(4, 8, device=device)).shape == (4, 8)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()


@KINDS
def test_meta_device(ours: Any, theirs: Any, device: torch.device) -> None:
    module = ours(16, device="meta").to_empty(device=device)
    module.reset_parameters()
    x = torch.randn(3, 16, device=device)
    assert torch.equal(module(x), ours(16, device=device)(x))
