"""Weight gradients that go elsewhere: into main_grad, or put off until backward_dw(); eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, compiled, linear, relative_error
from torch import Tensor, nn

SPLITS = pytest.mark.parametrize("split", [None, ("a", "b")])


def parts(layer: Any) -> list[nn.Parameter]:
    return [getattr(layer, name) for name in layer.weight_names]


def fused_layer(
    device: torch.device, split: Any = None, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Any:
    layer = linear(8, 6, device, dtype, fuse_wgrad_accumulation=True, parameters_split=split, **kwargs)
    for weight in parts(layer):
        weight.main_grad = torch.randn(weight.shape, device=device, dtype=torch.float32)
    return layer


def batch(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(5, 8, device=device, dtype=dtype, requires_grad=True), torch.randn(
        5, 6, device=device, dtype=dtype
    )


def main_grads(layer: Any) -> Tensor:
    return torch.cat([w.main_grad for w in parts(layer)]).clone()


# -------------------------------------------------------------------------------- main_grad --------


@SPLITS
@pytest.mark.parametrize("first", [True, False, None])
def test_main_grad(split: Any, first: bool | None, dtype: torch.dtype, device: torch.device) -> None:
    layer = fused_layer(device, split, dtype)
    before = main_grads(layer)
    x, dy = batch(device, dtype)
    layer(x, is_first_microbatch=first).backward(dy)
    want = dy.double().t() @ x.detach().double() + (0 if first else before.double())
    assert relative_error(main_grads(layer), want) < 1e-5
    assert all(w.grad is None for w in parts(layer))
    assert relative_error(x.grad, dy.double() @ torch.cat(parts(layer)).double()) < 5e-3
    biases = torch.cat([getattr(layer, n).grad for n in layer.bias_names])
    assert relative_error(biases, dy.double().sum(0)) < 5e-3


@SPLITS
def test_main_grad_compiled(split: Any, device: torch.device, backend: str) -> None:
    layer = fused_layer(device, split)
    other = copy.deepcopy(layer)
    fn, count = compiled(other, backend)
    for step in range(4):
        x, dy = batch(device)
        x2 = x.detach().clone().requires_grad_()
        first = step % 2 == 0
        y, y2 = layer(x, is_first_microbatch=first), fn(x2, is_first_microbatch=first)
        y.backward(dy)
        y2.backward(dy)
        assert_same_bits([y2, x2.grad, main_grads(other)], [y, x.grad, main_grads(layer)])
        assert all(w.grad is None for w in parts(other))
    assert count.frame_count == 2  # is_first_microbatch True and False


def test_main_grad_under_autocast(device: torch.device) -> None:
    layer = fused_layer(device)
    before = main_grads(layer)
    x, dy = batch(device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    y.backward(dy.bfloat16())
    want = dy.bfloat16().double().t() @ x.detach().bfloat16().double() + before.double()
    assert relative_error(layer.weight.main_grad, want) < 1e-5


def test_missing_main_grad_is_named() -> None:
    layer = linear(8, 6, torch.device("cpu"), fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"fuse_wgrad_accumulation=True, but weight.main_grad is not set"):
        layer(torch.randn(2, 8))
    with torch.no_grad():
        assert layer(torch.randn(2, 8)).shape == (2, 6)


def test_wrong_main_grad_is_named(device: torch.device) -> None:
    layer = fused_layer(device)
    layer.weight.main_grad = torch.zeros(6, 9, device=device)
    x, dy = batch(device)
    with pytest.raises(
        RuntimeError, match=r"te_ops::linear_wgrad: x\[1\] = 8: must be 9, which is K = main_grad\[1\]"
    ):
        layer(x).backward(dy)


def test_frozen_weight_leaves_main_grad_alone(device: torch.device) -> None:
    layer = fused_layer(device)
    layer.weight.requires_grad_(False)
    before = main_grads(layer)
    x, dy = batch(device)
    layer(x).backward(dy)
    assert torch.equal(main_grads(layer), before)


# ------------------------------------------------------------------------------- backward_dw --------


@SPLITS
@pytest.mark.parametrize("fuse", [False, True])
def test_backward_dw(split: Any, fuse: bool, device: torch.device) -> None:
    """Two microbatches in flight, their weight gradients computed later, oldest first."""
    plain = fused_layer(device, split)
    plain.fuse_wgrad_accumulation, plain._plain = fuse, not fuse
    delayed = linear(
        8, 6, device, parameters_split=split, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse
    )
    delayed.load_state_dict(plain.state_dict())
    for a, b in zip(parts(delayed), parts(plain), strict=True):
        a.main_grad = b.main_grad.clone()
    before = main_grads(plain)
    batches = [batch(device) for _ in range(2)]
    for x, dy in batches:
        plain(x).backward(dy)
    grads = [x.grad.clone() for x, _ in batches]
    for x, dy in batches:
        x.grad = None
        delayed(x).backward(dy)
        assert all(w.grad is None for w in parts(delayed))
        assert torch.equal(main_grads(delayed), before)
    assert_same_bits([x.grad for x, _ in batches], grads)
    assert delayed.need_backward_dw()
    calls: list[int] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    delayed.backward_dw()
    delayed.backward_dw()
    assert calls == [1, 1]
    got = [main_grads(delayed)] if fuse else [w.grad for w in parts(delayed)]
    want = [main_grads(plain)] if fuse else [w.grad for w in parts(plain)]
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 1e-6
    with pytest.raises(RuntimeError, match=r"backward_dw\(\) was called, but no backward is waiting"):
        delayed.backward_dw()


@pytest.mark.parametrize("fuse", [False, True])
def test_backward_dw_compiled(fuse: bool, device: torch.device, backend: str) -> None:
    layer = linear(8, 6, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    layer.weight.main_grad = torch.zeros(6, 8, device=device)
    other = copy.deepcopy(layer)
    model = nn.Sequential(nn.Tanh(), other, nn.SiLU())
    ref = nn.Sequential(nn.Tanh(), layer, nn.SiLU())
    fn, count = compiled(model, backend)
    batches = [batch(device) for _ in range(3)]
    for x, dy in batches:
        x2 = x.detach().clone().requires_grad_()
        y, y2 = ref(x), fn(x2)
        y.backward(dy)
        y2.backward(dy)
        assert other.weight.grad is None
        assert torch.allclose(x2.grad, x.grad)  # Tanh and SiLU are the compiler's own
    for _ in batches:
        layer.backward_dw()
        other.backward_dw()
    got, want = (m.weight.main_grad if fuse else m.weight.grad for m in (other, layer))
    assert relative_error(got, want) < (0 if backend == "aot_eager" else 1e-5) + 1e-12
    assert want.any()
    assert relative_error(other.bias.grad, layer.bias.grad) < 1e-5
    assert count.frame_count == 1
    with pytest.raises(RuntimeError, match="no backward is waiting"):
        other.backward_dw()


def test_pending_gradients_follow_a_move(device: torch.device) -> None:
    layer = linear(8, 6, torch.device("cpu"), delay_wgrad_compute=True)
    x, dy = batch(torch.device("cpu"))
    layer(x).backward(dy)
    layer.double().float()
    layer.backward_dw()
    assert relative_error(layer.weight.grad, dy.double().t() @ x.detach().double()) < 1e-6


def test_without_delay_backward_dw_does_nothing() -> None:
    layer = linear(8, 6, torch.device("cpu"))
    assert not layer.need_backward_dw()
    layer.backward_dw()
