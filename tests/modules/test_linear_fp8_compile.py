"""Linear under FP8 recipes, compiled: one graph, the bits of eager, over steps, modes and everything around."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import assert_same_bits, compiled, linear
from te_ops.recipe import DelayedScaling, Float8CurrentScaling
from torch import Tensor, nn

RECIPES = pytest.mark.parametrize("make", [Float8CurrentScaling, DelayedScaling], ids=["current", "delayed"])


def state_of(model: Any) -> list[Tensor]:
    return [t for entry in te.recipe_state(model).values() for t in entry.values()]


def train(
    model: Any, run: Any, recipe: Any, batches: Any, inside: bool = False, **kwargs: Any
) -> list[Tensor]:
    """Outputs and gradients of some steps; `inside`: the region is part of what `run` compiles."""
    results = []
    for x, dy in batches:
        x = x.detach().clone().requires_grad_()
        if inside:
            y = run(x)
        else:
            with te.autocast(recipe=recipe):
                y = run(x, **kwargs)
        y.backward(dy)
        results += [y.detach().clone(), x.grad.clone()]
        for p in model.parameters():
            if p.grad is not None:
                results.append(p.grad.clone())
                p.grad = None
    return results


def batches_of(n: int, device: torch.device, dtype: torch.dtype = torch.float32, rows: int = 8) -> Any:
    return [
        (
            torch.randn(rows, 16, device=device, dtype=dtype) * 2.0**i,
            torch.randn(rows, 8, device=device, dtype=dtype),
        )
        for i in range(n)
    ]


@RECIPES
@pytest.mark.parametrize("bias", [True, False])
def test_bits_of_eager(make: Any, bias: bool, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """20 steps: outputs, gradients, histories and scales."""
    eager = linear(16, 8, device, dtype, bias=bias)
    other = copy.deepcopy(eager)
    fn, count = compiled(other, backend)
    recipe = make() if make is Float8CurrentScaling else make(amax_history_len=6)
    batches = batches_of(20, device, dtype)
    assert_same_bits(train(other, fn, recipe, batches), train(eager, eager, recipe, batches))
    assert_same_bits(state_of(other), state_of(eager))
    assert count.frame_count <= 2  # the second: the history has another length than the default


@RECIPES
def test_region_inside_the_compiled_function(make: Any, device: torch.device, backend: str) -> None:
    eager = linear(16, 8, device)
    other = copy.deepcopy(eager)
    recipe = make()

    def inside(x: Tensor) -> Any:
        with te.autocast(recipe=recipe):
            return other(x)

    fn, count = compiled(inside, backend)
    batches = batches_of(6, device)
    with te.autocast(recipe=recipe), torch.no_grad():  # the region's counter exists
        eager(batches[0][0])
    assert_same_bits(train(other, fn, recipe, batches, inside=True), train(eager, eager, recipe, batches))
    assert_same_bits(state_of(other), state_of(eager))
    assert count.frame_count == 1


def test_nested_recipes_and_flag_flips(device: torch.device, backend: str) -> None:
    layers = [linear(16, 16, device) for _ in range(3)]
    current, pow2 = Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)

    def run(x: Tensor) -> Any:
        with te.autocast(recipe=current):
            x = layers[0](x)
            with te.autocast(recipe=pow2):
                x = layers[1](x)
                with te.autocast(enabled=False):
                    x = layers[2](x)
            return layers[0](x)

    fn, count = compiled(run, backend)
    x = torch.randn(4, 16, device=device)
    assert torch.equal(fn(x), run(x))
    assert count.frame_count == 1
    old = fn(x)
    current.use_power_2_scales = True
    assert torch.equal(fn(x), run(x))
    assert not torch.equal(fn(x), old)


@RECIPES
def test_dynamic_batch(make: Any, device: torch.device) -> None:
    layer = linear(12, 8, device)
    fn, count = compiled(layer, "aot_eager", dynamic=True)
    recipe = make()
    for rows in (16, 32, 48, 17, 5):
        x, dy = torch.randn(rows, 12, device=device), torch.randn(rows, 8, device=device)
        twin = copy.deepcopy(layer)
        assert_same_bits(train(layer, fn, recipe, [(x, dy)]), train(twin, twin, recipe, [(x, dy)]))
    assert count.frame_count == 1


@RECIPES
def test_modes_do_not_recompile(make: Any, device: torch.device) -> None:
    layer = linear(16, 8, device)
    fn, count = compiled(layer, "aot_eager")
    recipe, x = make(), torch.randn(4, 16, device=device)
    seen = []
    for _ in range(3):
        layer.train()
        train(layer, fn, recipe, batches_of(1, device, rows=4))
        layer.eval()
        with torch.no_grad(), te.autocast(recipe=recipe):
            assert torch.equal(fn(x), layer(x))
        seen.append(count.frame_count)
    assert seen[0] == seen[-1] <= 4


@RECIPES
@pytest.mark.parametrize("deferred", [False, True])
def test_weight_cache(make: Any, deferred: bool, device: torch.device, backend: str) -> None:
    eager = linear(16, 8, device)
    other = copy.deepcopy(eager)
    fn, count = compiled(other, backend)
    recipe = make()
    for _ in range(2):
        batches = batches_of(3, device)
        firsts = [True, False, False]
        results = []
        for model, run in ((other, fn), (eager, eager)):
            out, pending = [], []
            for (x, dy), first in zip(batches, firsts, strict=True):
                x = x.detach().clone().requires_grad_()
                with te.autocast(recipe=recipe):
                    y = run(x, is_first_microbatch=first)
                pending.append((x, y, dy))
                if not deferred:
                    y.backward(dy)
            for _, y, dy in pending if deferred else []:
                y.backward(dy)
            for x, y, _ in pending:
                out += [y.detach(), x.grad]
            out += [p.grad.clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
                    p.grad = None
            results.append(out)
        assert_same_bits(*results)
    frames = count.frame_count
    x = batches[0][0].clone().requires_grad_()
    with te.autocast(recipe=recipe):  # as the host can see it, or not
        got = [fn(x, is_first_microbatch=False)]
        other.weight.data[0].neg_()
        got.append(fn(x, is_first_microbatch=False))
    assert not torch.equal(*got)
    if make is Float8CurrentScaling:
        with te.autocast(recipe=recipe):
            assert torch.equal(got[1], other(x))
    assert count.frame_count == frames <= 4


@RECIPES
@pytest.mark.parametrize("reverse", [False, True])
def test_backwards_in_flight(make: Any, reverse: bool, device: torch.device, backend: str) -> None:
    """Forward, forward, backward, backward, in regions of their own."""
    eager = linear(16, 8, device)
    other = copy.deepcopy(eager)
    fn, _ = compiled(other, backend)
    recipe = make()
    for _ in range(3):
        results, batches = [], batches_of(2, device)
        for model, run in ((other, fn), (eager, eager)):
            inputs = [x.detach().clone().requires_grad_() for x, _ in batches]
            outputs = []
            for x in inputs:
                with te.autocast(recipe=recipe):
                    outputs.append(run(x))
            pairs = list(zip(outputs, batches, strict=True))
            for y, (_, dy) in reversed(pairs) if reverse else pairs:
                y.backward(dy)
            grads = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            results.append([*(y.detach() for y in outputs), *(x.grad for x in inputs), *grads])
        assert_same_bits(*results)
        assert_same_bits(state_of(other), state_of(eager))


@RECIPES
@pytest.mark.parametrize("first", [True, False])
def test_main_grad(make: Any, first: bool, device: torch.device, backend: str) -> None:
    eager = linear(16, 8, device, fuse_wgrad_accumulation=True)
    eager.weight.main_grad = torch.randn(8, 16, device=device)
    other = copy.deepcopy(eager)
    fn, _ = compiled(other, backend)
    recipe, batches = make(), batches_of(4, device)
    got = train(other, fn, recipe, batches, is_first_microbatch=first)
    assert_same_bits(got, train(eager, eager, recipe, batches, is_first_microbatch=first))
    assert torch.equal(other.weight.main_grad, eager.weight.main_grad)


@RECIPES
def test_backward_dw(make: Any, device: torch.device, backend: str) -> None:
    eager = linear(16, 8, device, delay_wgrad_compute=True)
    other = copy.deepcopy(eager)
    fn, _ = compiled(other, backend)
    recipe, batches = make(), batches_of(3, device)
    assert_same_bits(train(other, fn, recipe, batches), train(eager, eager, recipe, batches))
    for _ in batches:
        eager.backward_dw()
        other.backward_dw()
    assert torch.equal(other.weight.grad, eager.weight.grad)
    assert eager.weight.grad.any()


@RECIPES
def test_quantized_input(make: Any, device: torch.device) -> None:
    layer = linear(16, 8, device)
    fn, count = compiled(layer, "aot_eager")
    recipe = make()
    for _ in range(2):
        q = te.quantize(torch.randn(4, 16, device=device), col=True)
        twin = copy.deepcopy(layer)
        with te.autocast(recipe=recipe):
            got = fn(q)
        with te.autocast(recipe=recipe):
            want = twin(q)
        assert torch.equal(got, want)
    assert count.frame_count == 1


@RECIPES
def test_quantized_parameters(make: Any, device: torch.device, backend: str) -> None:
    with te.quantized_model_init(recipe=make()):
        eager = te.Linear(16, 8, device=device)
    other = copy.deepcopy(eager)
    fn, count = compiled(other, backend)
    recipe = make()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (other, eager)]
    for x, dy in batches_of(3, device, rows=4):
        out = []
        for model, run, optimizer in ((other, fn, optimizers[0]), (eager, eager, optimizers[1])):
            with te.autocast(recipe=recipe):
                y = run(x)
            y.backward(dy)
            out.append([y.detach(), model.weight.grad.clone(), model.bias.grad.clone()])
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(*out)
    assert torch.equal(other.weight.dequantize(), eager.weight.dequantize())
    assert isinstance(other.weight, te.QuantizedTensor)
    assert count.frame_count == 1


@RECIPES
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(make: Any, around: bool, reentrant: bool, device: torch.device) -> None:
    """Recomputation uses the scales of its forward and stages nothing twice, also in pipelined order."""
    plain = linear(16, 8, device)
    saved = copy.deepcopy(plain)
    recipe = make() if make is Float8CurrentScaling else make(amax_history_len=4)

    def forward(model: Any, x: Tensor) -> Any:
        if model is plain or not around:
            with te.autocast(recipe=recipe):
                return model(x) if model is plain else te.checkpoint(model, x, use_reentrant=reentrant)

        def inner(x: Tensor) -> Any:
            with te.autocast(recipe=recipe):
                return model(x)

        return te.checkpoint(inner, x, use_reentrant=reentrant)

    for _ in range(3):
        results = []
        batches = batches_of(2, device)
        for model in (plain, saved):
            inputs = [x.detach().clone().requires_grad_() for x, _ in batches]
            outputs = [forward(model, x) for x in inputs]  # fwd fwd bwd bwd
            for y, (_, dy) in zip(outputs, batches, strict=True):
                y.backward(dy)
            grads = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            results.append([*(y.detach() for y in outputs), *(x.grad for x in inputs), *grads])
        assert_same_bits(*results)
        assert_same_bits(state_of(saved), state_of(plain))


@RECIPES
def test_torch_checkpoint(make: Any, device: torch.device) -> None:
    """PyTorch's own, eager and compiled, with the region around the step."""
    plain, recipe = linear(16, 8, device), make()
    saved, other = copy.deepcopy(plain), copy.deepcopy(plain)

    def call(model: Any) -> Any:
        return lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    fn, _ = compiled(call(other), "aot_eager")
    for x, dy in batches_of(3, device):
        results = []
        for model, run in ((plain, plain), (saved, call(saved)), (other, fn)):
            x = x.detach().clone().requires_grad_()
            with te.autocast(recipe=recipe):
                y = run(x)
                y.backward(dy)
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])
    assert_same_bits(state_of(saved), state_of(plain))
    assert_same_bits(state_of(other), state_of(plain))


@RECIPES
def test_reduce_overhead(make: Any, cuda: torch.device) -> None:
    from torch._dynamo.utils import counters

    eager = linear(64, 32, cuda, torch.bfloat16)
    other = copy.deepcopy(eager)
    fn = torch.compile(other, fullgraph=True, mode="reduce-overhead")
    recipe = make()
    counters.clear()
    batches = [
        (
            torch.randn(16, 64, device=cuda, dtype=torch.bfloat16),
            torch.randn(16, 32, device=cuda, dtype=torch.bfloat16),
        )
        for _ in range(20)
    ]
    assert_same_bits(train(other, fn, recipe, batches), train(eager, eager, recipe, batches))
    assert_same_bits(state_of(other), state_of(eager))
    assert counters["inductor"]["cudagraph_skips"] == 0


@RECIPES
def test_reduce_overhead_with_weight_cache(make: Any, cuda: torch.device) -> None:
    from torch._dynamo.utils import counters

    eager = linear(64, 32, cuda, torch.bfloat16)
    other = copy.deepcopy(eager)
    other.make_weight_cache()
    fn = torch.compile(other, fullgraph=True, mode="reduce-overhead")
    recipe = make()
    counters.clear()
    for _ in range(6):
        for first in (True, False, False):
            x = torch.randn(16, 64, device=cuda, dtype=torch.bfloat16)
            dy = torch.randn(16, 32, device=cuda, dtype=torch.bfloat16)
            kwargs = {"is_first_microbatch": first}
            got = train(other, fn, recipe, [(x, dy)], **kwargs)
            assert_same_bits(got, train(eager, eager, recipe, [(x, dy)], **kwargs))
        with torch.no_grad():
            for a, b in zip(eager.parameters(), other.parameters(), strict=True):
                a.add_(torch.randn_like(a))
                b.copy_(a)
    assert counters["inductor"]["cudagraph_skips"] == 0


@RECIPES
def test_cuda_graph_of_a_cached_microbatch(make: Any, cuda: torch.device) -> None:
    """A graph of a later microbatch, replayed after the weight has changed in ways that nobody counts."""
    layer = linear(64, 32, cuda, torch.bfloat16)
    x = torch.randn(16, 64, device=cuda, dtype=torch.bfloat16)
    recipe = make()

    def call(first: bool | None) -> Tensor:
        with torch.no_grad(), te.autocast(recipe=recipe):
            return layer(x, is_first_microbatch=first)

    call(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(False)
    graph.replay()
    for change in (lambda w: w.mul_(-1), lambda w: w[3].neg_(), lambda w: w.copy_(torch.randn_like(w))):
        old = y.clone()
        change(layer.weight.data)
        graph.replay()
        assert not torch.equal(y, old)
        if make is Float8CurrentScaling:
            assert torch.equal(y, call(None))
        new = y.clone()
        graph.replay()
        if make is Float8CurrentScaling:
            assert torch.equal(y, new)
        change(layer.weight.data)
        assert not torch.equal(call(False), new)  # eager code, too, no longer trusts the host


@RECIPES
def test_cuda_graph_of_a_step(make: Any, cuda: torch.device) -> None:
    """The whole step recorded, region entry included, replayed 20 times: the bits of eager."""
    eager = linear(64, 32, cuda, torch.bfloat16)
    recipe = make()
    x = torch.randn(16, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(16, 32, device=cuda, dtype=torch.bfloat16)

    def one(model: Any) -> Tensor:
        with te.autocast(recipe=recipe):
            y = model(x)
        y.backward(dy)
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one(eager)
    torch.cuda.current_stream().wait_stream(stream)
    other = copy.deepcopy(eager)
    eager.zero_grad()
    other.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one(other)
    grads = x.grad, other.weight.grad, other.bias.grad
    data = [(torch.randn_like(x) * 2.0**i, torch.randn_like(dy)) for i in range(20)]
    for new_x, new_dy in data:
        with torch.no_grad():
            x.copy_(new_x)
            dy.copy_(new_dy)
        graph.replay()
        got = [t.clone() for t in (y.detach(), *grads)]
        x.grad = None
        eager.zero_grad()
        want = [one(eager).detach(), x.grad, eager.weight.grad, eager.bias.grad]
        assert_same_bits(got[:1], want[:1])
        assert_same_bits(got[2:], want[2:])
    assert_same_bits(state_of(other), state_of(eager))


def test_export(device: torch.device) -> None:
    layer = linear(16, 8, device)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            with te.autocast(recipe=Float8CurrentScaling()):
                return self.layer(x)

    x = torch.randn(4, 16, device=device)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: batch},))
    x = torch.randn(7, 16, device=device)
    with torch.no_grad():
        assert torch.equal(program.module()(x), Model()(x))


def test_save_and_load_quantized_parameters(device: torch.device) -> None:
    with te.quantized_model_init():
        layer = te.Linear(16, 8, device=device)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    with te.quantized_model_init():
        twin = te.Linear(16, 8, device=device)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin.weight.dequantize(), layer.weight.dequantize())
    plain = te.Linear(16, 8, device=device)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight.dequantize())
