"""Linear under per-tensor FP8 recipes: numbers, gradients, shapes, delayed scaling; eager."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import assert_same_bits, linear, reference_vectors, relative_error, step
from te_ops import _delayed
from te_ops.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DATA = reference_vectors()["modules"]
RECIPES = pytest.mark.parametrize("make", [Float8CurrentScaling, DelayedScaling], ids=["current", "delayed"])
SHAPES = [((32,), 64, 48), ((5, 3), 17, 9), ((7,), 128, 33), ((130,), 40, 24), ((), 16, 16)]


def reset(layer: Any) -> None:
    for name in _delayed.BUFFERS:
        _delayed.reset(getattr(layer, name))


def roll(layer: Any, recipe: DelayedScaling, empty: Tensor) -> None:
    """Begins a region in which nothing is staged."""
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(empty)
        te._linear_fp8.quantize_delayed(
            empty, layer._fp8_backward_state, te._autocast.region(empty.device), None, recipe.amax_history_len,
            recipe.margin, 3, True, True, False, recipe.amax_compute_algo == "most_recent", True, False,
        )  # fmt: skip


class Recipe:
    """A module that always runs under a recipe."""

    def __init__(self, module: Any, recipe: Any) -> None:
        self.module, self.recipe = module, recipe

    def __call__(self, x: Any, **kwargs: Any) -> Any:
        with te.autocast(recipe=self.recipe):
            return self.module(x, **kwargs)


def values(x: Tensor, codes: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """What the GEMMs see of x, in float64."""
    q = te.quantize(x.detach(), dtype=codes, scale=scale)
    assert q.row is not None
    return q.row.double() * q.scale_inv.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3], ids=["hybrid", "e4m3"])
def test_against_float64(shape: Any, fmt: Format, dtype: torch.dtype, device: torch.device) -> None:
    """Gradients and outputs of the dequantized operands; the first step of delayed scaling has scale 1."""
    lead, k, n = shape
    layer = linear(k, n, device, dtype)
    x = torch.randn(*lead, k, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(*lead, n, device=device, dtype=dtype)
    grad_codes = E5M2 if fmt is Format.HYBRID else E4M3
    one = torch.ones(1, device=device)
    for recipe, scale in (
        (Float8CurrentScaling(fp8_format=fmt), None),
        (DelayedScaling(fp8_format=fmt), one),
    ):
        x.grad, layer.weight.grad, layer.bias.grad = None, None, None
        y = Recipe(layer, recipe)(x)
        y.backward(dy)
        xq, wq = values(x, E4M3, scale), values(layer.weight, E4M3, scale)
        dyq = values(dy, grad_codes, scale)
        flat = dyq.reshape(-1, n)
        limit = {torch.bfloat16: 3e-3, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
        if device.type == "cuda":
            limit += 3e-3
        assert relative_error(y, xq @ wq.t() + layer.bias.double()) < limit
        assert relative_error(x.grad, dyq @ wq) < limit
        assert relative_error(layer.weight.grad, flat.t() @ xq.reshape(-1, k)) < limit
        assert relative_error(layer.bias.grad, dy.double().reshape(-1, n).sum(0)) < max(limit, 4e-3)


@pytest.mark.full
@pytest.mark.parametrize("k", [4096, 16384, 20000])
def test_long_sums(k: int, device: torch.device) -> None:
    layer = linear(k, 64, device, torch.float32)
    x = torch.randn(48, k, device=device)
    y = Recipe(layer, Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True)))(x)
    want = values(x, E4M3) @ values(layer.weight, E4M3).t() + layer.bias.double()
    assert relative_error(y, want) < (1e-5 if device.type == "cpu" else 3e-3)


@pytest.mark.parametrize("name", sorted(DATA))
def test_transformer_engine_steps(name: str, device: torch.device) -> None:
    """Three steps of a layer; histories and scales bit for bit, results within bf16's rounding."""
    recorded = DATA[name]
    params = recorded["params"]
    layer = te.Linear(128, 256, bias="bias" in params, device=device, params_dtype=torch.bfloat16)
    layer.load_state_dict(params)
    if "current" in name:
        recipe: Any = Float8CurrentScaling()
    elif "recent" in name:
        recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1)
    else:
        recipe = DelayedScaling(amax_history_len=4)
    for want in recorded["steps"]:
        x = want["x"].detach().clone().to(device).requires_grad_()
        y = Recipe(layer, recipe)(x)
        layer.zero_grad()
        y.backward(want["dy"].to(device))
        if "scaling_fwd" in want:
            roll(layer, recipe, x.detach()[:0])
            state = te.recipe_state(layer)[""]
            assert torch.equal(state["fwd_scale"][:2].cpu(), want["scaling_fwd"]["scale"][:2])
            assert torch.equal(state["fwd_history"][:, :2].cpu(), want["scaling_fwd"]["hist"][:, :2])
            assert torch.equal(state["bwd_scale"][:1].cpu(), want["scaling_bwd"]["scale"][:1])
            assert torch.equal(state["bwd_history"][:, :1].cpu(), want["scaling_bwd"]["hist"][:, :1])
        if "y" in want:
            assert relative_error(y, want["y"]) < 3e-3
            assert relative_error(x.grad, want["dx"]) < 3e-3
            for key, grad in want["grads"].items():
                assert relative_error(layer.get_parameter(key).grad, grad) < 3e-3


@RECIPES
@pytest.mark.parametrize("needs", range(8))
def test_every_subset_of_gradients(make: Any, needs: int, device: torch.device) -> None:
    layer, recipe = linear(24, 16, device), make()
    x = torch.randn(9, 24, device=device, requires_grad=True)
    dy = torch.randn(9, 16, device=device)
    params = [layer.weight, layer.bias]
    full = step(Recipe(layer, recipe), x, dy, params)
    for i, t in enumerate((x, *params)):
        t.requires_grad_(bool(needs >> i & 1))
    reset(layer)
    got = step(Recipe(layer, recipe), x, dy, params)
    assert torch.equal(got[0], full[0])
    for i in range(3):
        if needs >> i & 1:  # who sums the bias gradient depends on which copies of dy are made
            assert relative_error(got[1 + i], full[1 + i]) <= (1e-6 if i == 2 else 0)
        else:
            assert got[1 + i].numel() == 0


@RECIPES
@pytest.mark.parametrize("m", [1, 5, 17, 100])
def test_padding_is_not_seen(make: Any, m: int, device: torch.device) -> None:
    """Odd sizes equal the padded layer's slice: padding is in no amax and in no product."""
    k, n = 33, 21
    layer = linear(k, n, device)
    wide = linear(48, 32, device)
    x, dy = torch.randn(m, k, device=device), torch.randn(m, n, device=device)
    with torch.no_grad():
        for p in wide.parameters():
            p.zero_()
        wide.weight[:n, :k] = layer.weight
        wide.bias[:n] = layer.bias
    x_wide, dy_wide = torch.zeros(112, 48, device=device), torch.zeros(112, 32, device=device)
    x_wide[:m, :k], dy_wide[:m, :n] = x, dy
    got = step(Recipe(layer, make()), x.requires_grad_(), dy, list(layer.parameters()))
    want = step(Recipe(wide, make()), x_wide.requires_grad_(), dy_wide, list(wide.parameters()))
    slices = [(slice(m), slice(n)), (slice(m), slice(k)), (slice(n), slice(k)), (slice(n),)]
    for g, w, part in zip(got, want, slices, strict=True):
        assert relative_error(g, w[part]) < 2e-6 if device.type == "cpu" else 2e-3


@RECIPES
def test_layouts(make: Any, device: torch.device) -> None:
    layer = linear(24, 16, device)
    base = torch.randn(10, 24, device=device)
    dy = torch.randn(10, 16, device=device)
    want = step(Recipe(layer, make()), base.clone().requires_grad_(), dy, list(layer.parameters()))
    for x in (base.t().contiguous().t(), torch.cat([base, base], 1)[:, :24]):
        for g in (dy, dy.t().contiguous().t(), torch.cat([dy, dy], 1)[:, 16:]):
            reset(layer)
            got = step(Recipe(layer, make()), x.requires_grad_(), g, list(layer.parameters()))
            for a, b in zip(got[:3], want[:3], strict=True):
                assert torch.equal(a, b)
            assert relative_error(got[3], want[3]) < 1e-6
            x = x.detach()


@RECIPES
def test_empty_sizes(make: Any, device: torch.device) -> None:
    for m, k, n in ((0, 8, 4), (3, 0, 4), (3, 8, 0)):
        layer = linear(k, n, device)
        x = torch.randn(m, k, device=device, requires_grad=True)
        y, dx, dw, db = step(
            Recipe(layer, make()), x, torch.randn(m, n, device=device), list(layer.parameters())
        )
        assert y.shape == (m, n)
        assert torch.equal(y, layer.bias.detach().expand(m, n)) or k > 0
        assert dx.shape == x.shape
        assert not dw.any()
        assert db.shape == (n,)


# ---------------------------------------------------------------------------------- delayed scaling --------


def amaxes(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
    return torch.stack(
        [
            x.abs().max(),
            layer.weight.abs().max(),
            torch.zeros_like(x.max()),
            dy.abs().max(),
            torch.zeros_like(x.max()),
        ]
    ).float()


@pytest.mark.parametrize("algo", ["max", "most_recent", "mean"])
def test_history_and_scales(algo: str, device: torch.device) -> None:
    """Against the definition, step by step, with several uses in a region and accumulation over two of them."""
    margin, length = 1, 5
    compute: Any = (lambda h: h.mean(0)) if algo == "mean" else algo
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=compute)
    layer = linear(16, 8, device)
    history, scale = torch.zeros(length, 5, device=device), torch.ones(5, device=device)
    largest = torch.tensor([448.0] * 3 + [57344.0] * 2, device=device)
    for i in range(8):
        with te.autocast(recipe=recipe):
            staged = history[0].clone()
            if algo == "mean":
                amax = history.mean(0)
            else:
                amax = history.max(0).values if algo == "max" else staged
            new = largest / amax / 2.0**margin
            rolls = staged > 0
            scale = torch.where(rolls & (amax > 0), new, scale)
            rolled = history.roll(-1, 0)
            rolled[0] = 0
            history = torch.where(rolls, rolled, history)
            for _ in range(1 + i % 2):
                x = torch.randn(4, 16, device=device) * 2.0**i
                x.requires_grad_()
                dy = torch.randn(4, 8, device=device)
                layer(x).backward(dy)
                history[0] = torch.maximum(history[0], amaxes(layer, x, dy))
                state = te.recipe_state(layer)[""]
                assert torch.equal(torch.cat([state["fwd_scale"], state["bwd_scale"]]), scale)
                got = torch.cat([state["fwd_history"], state["bwd_history"]], 1)
                assert torch.equal(got, history)


def test_no_grad_stages_nothing(device: torch.device) -> None:
    layer, x = linear(16, 8, device), torch.randn(4, 16, device=device)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, te.autocast(recipe=DelayedScaling()):
            layer(x)
    assert not te.recipe_state(layer)[""]["fwd_history"].any()
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        y = layer(x)
    assert torch.equal(y, layer(x))
    staged = te.recipe_state(layer)[""]["fwd_history"][0]
    assert torch.equal(staged[:2], torch.stack([x.abs().max(), layer.weight.abs().max()]))


def test_one_bad_step_does_not_freeze_the_scale(device: torch.device) -> None:
    layer = linear(16, 8, device)
    call = Recipe(layer, DelayedScaling())
    x = torch.randn(4, 16, device=device)
    for _ in range(2):
        call(x)
    before = te.recipe_state(layer)[""]["fwd_scale"]
    bad = x.clone()
    bad[0, 0] = float("inf")
    assert call(bad).isfinite().all()  # saturates
    bad[0, 0] = float("nan")
    assert call(bad).isnan().any()
    call(x)
    assert torch.equal(te.recipe_state(layer)[""]["fwd_scale"], before)


def test_changed_history_length(device: torch.device) -> None:
    layer, x = linear(16, 8, device), torch.randn(4, 16, device=device)
    recipe = DelayedScaling(amax_history_len=4)
    for i in range(6):
        Recipe(layer, recipe)(x * (i + 1))
    old = te.recipe_state(layer)[""]["fwd_history"]
    for length in (6, 3, 2000):
        recipe.amax_history_len = length
        with torch.no_grad():
            Recipe(layer, recipe)(x)
        new = te.recipe_state(layer)[""]["fwd_history"]
        assert new.shape == (length, 3)
        assert torch.equal(new[-1], new.max(0).values)
    assert old[-1, 0] <= new[-1, 0]


def test_state_round_trip(device: torch.device) -> None:
    recipe = DelayedScaling(amax_history_len=1024)
    model = nn.Sequential(linear(16, 16, device), nn.Tanh(), linear(16, 8, device))
    twin = nn.Sequential(linear(16, 16, device), nn.Tanh(), linear(16, 8, device))
    batches = [(torch.randn(4, 16, device=device), torch.randn(4, 8, device=device)) for _ in range(6)]

    def run(m: Any, part: Any) -> list[Tensor]:
        out = []
        for x, dy in part:
            with te.autocast(recipe=recipe):
                y = m(x)
            y.backward(dy)
            out.append(y.detach())
        return out

    run(model, batches[:3])
    twin.load_state_dict(model.state_dict())
    te.load_recipe_state(twin, te.recipe_state(model))
    assert_same_bits(run(twin, batches[3:]), run(model, batches[3:]))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    state = te.recipe_state(model)
    state["0"]["fwd_history"] = state["0"]["fwd_history"][:7]
    with pytest.raises(
        ValueError, match=r"'0': bwd_history is torch.float32 \[1024, 2\]: must be float32 \[7, 2\]"
    ):
        te.load_recipe_state(model, state)


# ------------------------------------------------------------------------------- what surrounds it --------


@RECIPES
@pytest.mark.parametrize("split", [None, ("a", "b")])
@pytest.mark.parametrize("first", [True, False, None])
def test_main_grad(make: Any, split: Any, first: bool | None, device: torch.device) -> None:
    layer = linear(16, 8, device, torch.bfloat16, parameters_split=split, fuse_wgrad_accumulation=True)
    weights = [getattr(layer, n) for n in layer.weight_names]
    for w in weights:
        w.main_grad = torch.randn(w.shape, device=device)
    before = torch.cat([w.main_grad for w in weights]).clone()
    x = torch.randn(6, 16, device=device, dtype=torch.bfloat16)
    dy = torch.randn(6, 8, device=device, dtype=torch.bfloat16)
    Recipe(layer, make())(x, is_first_microbatch=first).backward(dy)
    scale = torch.ones(1, device=device) if make is DelayedScaling else None
    want = values(dy, E5M2, scale).t() @ values(x, E4M3, scale) + (0 if first else before.double())
    assert (
        relative_error(torch.cat([w.main_grad for w in weights]), want)
        < 1e-5 + (device.type == "cuda") * 2e-3
    )
    assert all(w.grad is None for w in weights)


@RECIPES
@pytest.mark.parametrize("fuse", [False, True])
def test_backward_dw(make: Any, fuse: bool, device: torch.device) -> None:
    plain = linear(16, 8, device)
    delayed = linear(16, 8, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    delayed.load_state_dict(plain.state_dict())
    delayed.weight.main_grad = torch.zeros(8, 16, device=device)
    for _ in range(2):
        x, dy = torch.randn(6, 16, device=device), torch.randn(6, 8, device=device)
        Recipe(plain, make())(x).backward(dy)
        Recipe(delayed, make())(x).backward(dy)
    assert delayed.weight.grad is None
    delayed.backward_dw()
    delayed.backward_dw()
    got = delayed.weight.main_grad if fuse else delayed.weight.grad
    assert relative_error(got, plain.weight.grad) < 1e-6
    assert torch.equal(delayed.bias.grad, plain.bias.grad)


@RECIPES
def test_quantized_input_is_not_quantized_again(make: Any, dtype: torch.dtype, device: torch.device) -> None:
    layer = linear(32, 16, device, dtype)
    x, dy = torch.randn(8, 32, device=device, dtype=dtype), torch.randn(8, 16, device=device, dtype=dtype)
    for col in (False, True):
        layer.zero_grad()
        q = te.quantize(x, col=col)
        y = Recipe(layer, make())(q)
        y.backward(dy)
        scale = torch.ones(1, device=device) if make is DelayedScaling else None
        want = (
            q.dequantize(torch.float32).double() @ values(layer.weight, E4M3, scale).t() + layer.bias.double()
        )
        assert relative_error(y, want) < 6e-3
        reset(layer)
    assert (
        relative_error(layer.weight.grad, values(dy, E5M2, scale).t() @ q.dequantize(torch.float32).double())
        < 6e-3
    )


def test_misaligned_buffers(device: torch.device) -> None:
    """Codes and scales anywhere in memory."""
    layer = linear(32, 16, device)
    q = te.quantize(torch.randn(8, 32, device=device))
    scale_inv = torch.cat([torch.ones(3, device=device), q.scale_inv])[3:]
    row = torch.empty(8 * 32 + 5, device=device, dtype=E4M3)[5:].view(8, 32)
    row.view(torch.uint8).copy_(q.row.view(torch.uint8))
    with te.autocast(recipe=Float8CurrentScaling()):
        moved = te.QuantizedTensor(row, None, scale_inv, dtype=torch.float32)
        assert torch.equal(layer(moved), layer(q))


@RECIPES
def test_fp8_output_and_gradient(make: Any, device: torch.device) -> None:
    a, b = linear(16, 32, device), linear(32, 8, device)
    x = torch.randn(6, 16, device=device, requires_grad=True)
    dy = torch.randn(6, 8, device=device)
    with te.autocast(recipe=make()):
        h = a(x, fp8_output=True)
        assert isinstance(h, te.QuantizedTensor)
        y = b(h, fp8_grad=True)
    y.backward(dy)
    reset(a)
    with torch.no_grad(), te.autocast(recipe=make()):
        hidden = a(x)
        scale = torch.ones(1, device=device) if make is DelayedScaling else None
        want = te.quantize(hidden, scale=scale)
        assert torch.equal(h.row.view(torch.uint8), want.row.view(torch.uint8))
        assert isinstance(a(x, fp8_output=True), te.QuantizedTensor)
    grad_h = values(dy, E5M2, scale) @ values(b.weight, E4M3, scale)
    assert relative_error(b.weight.grad, values(dy, E5M2, scale).t() @ h.dequantize().double()) < 5e-3
    dx = values(grad_h.float(), E5M2, scale) @ values(a.weight, E4M3, scale)
    assert relative_error(x.grad, dx) < 2e-2


@RECIPES
def test_save_original_input(make: Any, device: torch.device) -> None:
    one, two = linear(16, 8, device), linear(16, 8, device, save_original_input=True)
    two.load_state_dict(one.state_dict())
    x, dy = torch.randn(6, 16, device=device, requires_grad=True), torch.randn(6, 8, device=device)
    params = [list(m.parameters()) for m in (one, two)]
    assert_same_bits(step(Recipe(two, make()), x, dy, params[1]), step(Recipe(one, make()), x, dy, params[0]))


def test_amp(device: torch.device) -> None:
    """fp32 parameters under bf16 autocast: activations bf16, weights quantized from fp32, their gradient fp32."""
    layer = linear(32, 16, device)
    x, dy = torch.randn(8, 32, device=device), torch.randn(8, 16, device=device, dtype=torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        y = Recipe(layer, Float8CurrentScaling())(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    assert layer.weight.grad.dtype == torch.float32
    want = values(dy, E5M2).t() @ values(x.bfloat16(), E4M3)
    assert relative_error(layer.weight.grad, want) < 1e-5 + (device.type == "cuda") * 2e-3
    assert (
        relative_error(y, values(x.bfloat16(), E4M3) @ values(layer.weight, E4M3).t() + layer.bias.double())
        < 6e-3
    )


def test_options_are_read_at_each_call(device: torch.device) -> None:
    layer, x = linear(32, 16, device), torch.randn(8, 32, device=device)
    recipe = Float8CurrentScaling()
    plain = Recipe(layer, recipe)(x)
    recipe.use_power_2_scales = True
    rounded = Recipe(layer, recipe)(x)
    assert not torch.equal(plain, rounded)
    assert torch.equal(rounded, Recipe(layer, Float8CurrentScaling(use_power_2_scales=True))(x))
    with te.autocast(recipe=recipe), te.autocast(enabled=False):
        assert (
            torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
            or device.type == "cuda"
        )


def test_double_backward_is_an_error(device: torch.device) -> None:
    layer = linear(16, 8, device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(Recipe(layer, Float8CurrentScaling())(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


def test_messages(device: torch.device) -> None:
    layer = linear(16, 8, device)
    x = torch.randn(4, 16, device=device)
    with pytest.raises(ValueError, match="fp8_output=True: no recipe is active"):
        layer(x, fp8_output=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        with pytest.raises(
            RuntimeError, match=r"te_ops::linear_fp8_fwd: x\[1\] = 15: must be 16, which is K = w\[1\]"
        ):
            layer(x[:, :15])
        with pytest.raises(TypeError, match=r"inp must be a torch\.Tensor"):
            layer([1.0])
        assert layer(x).shape == (4, 8)
    with pytest.raises(TypeError, match=r"recipe is a .*Other: must be a recipe of te_ops\.recipe"):
        te.autocast(recipe=type("Other", (), {})())


@RECIPES
def test_weight_cache(make: Any, device: torch.device) -> None:
    """The same numbers as without; each way to change a weight is noticed."""
    layer, plain = linear(16, 8, device), linear(16, 8, device)
    plain.load_state_dict(layer.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, plain)]
    recipe, other = make(), make()
    for _ in range(2):
        for first in (True, False, False):
            x, dy = torch.randn(6, 16, device=device), torch.randn(6, 8, device=device)
            a, b = Recipe(layer, recipe)(x, is_first_microbatch=first), Recipe(plain, other)(x)
            if make is Float8CurrentScaling:
                assert torch.equal(a, b)
            a.backward(dy)
            b.backward(dy)
        for o in optimizers:
            o.step()
            o.zero_grad()
        plain.load_state_dict(layer.state_dict())
    call = Recipe(layer, Float8CurrentScaling())
    changes: list[Any] = [
        lambda: layer.weight.mul_(2),
        lambda: setattr(layer.weight, "data", torch.randn_like(layer.weight)),
        lambda: layer.load_state_dict(linear(16, 8, device).state_dict()),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
    ]
    with torch.no_grad():
        call(x, is_first_microbatch=True)
        for change in changes:
            old = call(x, is_first_microbatch=False)
            change()
            new = call(x, is_first_microbatch=False)
            assert not torch.equal(new, old)
            assert torch.equal(new, call(x))


# ----------------------------------------------------------------------------- what once went wrong --------


def test_first_use_in_inference_mode(device: torch.device) -> None:
    layer, x = linear(16, 8, device), torch.randn(4, 16, device=device)
    for recipe in (DelayedScaling(amax_history_len=1500), Float8CurrentScaling()):
        with torch.inference_mode():
            Recipe(layer, recipe)(x, is_first_microbatch=True)
        y = Recipe(layer, recipe)(x.requires_grad_(), is_first_microbatch=False)
        y.sum().backward()
        x = x.detach()


def test_cache_overwritten_before_backward(device: torch.device) -> None:
    layer, x = linear(16, 8, device), torch.randn(4, 16, device=device, requires_grad=True)
    call = Recipe(layer, Float8CurrentScaling())
    y = call(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(2)
    call(x, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_cache_and_conversions(device: torch.device) -> None:
    layer, x = linear(16, 8, device), torch.randn(4, 16, device=device)
    call = Recipe(layer, Float8CurrentScaling())
    call(x, is_first_microbatch=True)
    layer.to(torch.bfloat16)
    x = x.bfloat16()
    assert torch.equal(call(x, is_first_microbatch=False), call(x))
    assert layer._fp8_state.dtype == torch.int32


def test_deferred_gradient_owns_its_dy(device: torch.device) -> None:
    """Autograd may hand the memory of dy to somebody who adds to it."""
    layer = linear(16, 8, device, delay_wgrad_compute=True)
    p = nn.Parameter(torch.zeros(4, 8, device=device))
    want = torch.zeros(8, 16, device=device)
    for _ in range(2):
        x, dy = torch.randn(4, 16, device=device), torch.randn(4, 8, device=device)
        (layer(x) + p.view(4, 8)).backward(dy)
        want += dy.t() @ x
    layer.backward_dw()
    layer.backward_dw()
    assert relative_error(layer.weight.grad, want) < 2e-3 if device.type == "cuda" else 1e-5
    x = torch.randn(4, 16, device=device)
    layer(x).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="input was modified in place after its backward"):
        layer.backward_dw()


def test_gradient_of_another_format(device: torch.device) -> None:
    a, b = linear(16, 8, device, delay_wgrad_compute=True), linear(8, 8, device)
    x = torch.randn(4, 16, device=device)
    with te.autocast(recipe=Float8CurrentScaling()):
        h = a(x)
    with te.autocast(recipe=Float8CurrentScaling(fp8_format=Format.E4M3)):
        b(h, fp8_grad=True).sum().backward()
    a.backward_dw()
    assert a.weight.grad.isfinite().all()


def test_wrong_dtypes_are_named(device: torch.device) -> None:
    layer = linear(16, 8, device)
    with pytest.raises(TypeError, match=r"inp is torch.float64 and the weight torch.float32"):
        Recipe(layer, Float8CurrentScaling())(torch.randn(4, 16, device=device, dtype=torch.float64))
    dy = torch.randn(4, 8, device=device)
    with pytest.raises(RuntimeError, match="dy does not have the dtype of db"):
        torch.ops.te_ops.linear_fp8_bwd(dy, None, None, None, None, None, None, 0, 0, 0b100)


def test_fake_mode_leaves_no_fake_behind(device: torch.device) -> None:
    from te_ops._autocast import _regions
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved = dict(_regions)
    _regions.clear()
    with FakeTensorMode(), te.autocast(recipe=DelayedScaling()):
        te.Linear(8, 4, device=device)(torch.randn(2, 8, device=device))
    assert all(type(t) is Tensor for t in _regions.values())
    _regions.update(saved)


def test_checkpoints_of_transformer_engine(device: torch.device) -> None:
    """Its extra state is not executed; the weights load."""
    model, source = nn.Sequential(linear(16, 8, device)), linear(16, 8, device)
    state: dict[str, Any] = {f"0.{k}": v for k, v in source.state_dict().items()}
    state["0._extra_state"] = io.BytesIO(b"not a pickle that anybody should open")
    with pytest.warns(UserWarning, match="_extra_state is skipped") as seen:
        model.load_state_dict(state)
    assert len(seen) == 1
    assert torch.equal(model[0].weight, source.weight)
    state["0._extra_state"] = torch.empty(0, dtype=torch.uint8)
    model.load_state_dict(state)


@pytest.mark.full
def test_converges_as_high_precision_does(device: torch.device) -> None:
    """500 steps of a character model on real text: the final loss is within 1 % of bf16's (fp32 on the CPU)."""
    text = (Path(__file__).parents[2] / "examples" / "data" / "persuasion.txt").read_bytes()
    symbols = sorted(set(text))
    tokens = torch.tensor([symbols.index(b) for b in text[:200_000]], device=device)
    context, batch = 16, 256
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def final_loss(recipe: Any) -> float:
        torch.manual_seed(1818)
        with device:
            body = nn.Sequential(
                nn.Embedding(len(symbols), 32), nn.Flatten(),
                te.Linear(context * 32, 256), nn.GELU(), te.Linear(256, 256), nn.GELU(),
            ).to(dtype)  # fmt: skip
            head = te.Linear(256, len(symbols)).to(dtype)  # in high precision, as is usual
        model = nn.Sequential(body, head)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for _ in range(500):
            at = torch.randint(len(tokens) - context - 1, (batch,)).to(device)
            window = tokens[at[:, None] + torch.arange(context + 1, device=device)]
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                hidden = body(window[:, :-1])
            logits = head(hidden)
            loss = nn.functional.cross_entropy(logits.float(), window[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-50:]) / 50

    reference = final_loss(None)
    assert reference < 2.6
    for recipe in (Float8CurrentScaling(), DelayedScaling()):
        assert final_loss(recipe) < 1.01 * reference
