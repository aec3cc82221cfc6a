"""Linear under torch.compile(fullgraph=True): one graph, the bits of eager, no recompiles."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import te_ops as te
import torch
from helpers import DTYPES, assert_same_bits, compiled, linear, step
from torch import nn


def inputs(
    rows: int, k: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32, grad: bool = True
) -> Any:
    x = torch.randn(rows, k, device=device).to(dtype).requires_grad_(grad)
    return x, torch.randn(rows, n, device=device).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_bits_of_eager(bias: bool, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    layer = linear(40, 24, device, dtype, bias=bias)
    fn, count = compiled(layer, backend)
    params = list(layer.parameters())
    for _ in range(3):
        x, dy = inputs(16, 40, 24, device, dtype)
        assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
    assert count.frame_count == 1


@pytest.mark.inductor
def test_bits_of_eager_inductor(device: torch.device) -> None:
    """The one Inductor run of the fast tier: several layers with other operators between them."""
    model = nn.Sequential(linear(12, 24, device), nn.ReLU(), linear(24, 8, device, bias=False))
    fn, count = compiled(model, "inductor")
    params = list(model.parameters())
    for rows in (6, 9, 10):
        x, dy = inputs(rows, 12, 8, device)
        assert_same_bits(step(fn, x, dy, params), step(model, x, dy, params))
    assert count.frame_count <= 2


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
def test_every_subset_of_gradients(
    needs: tuple[bool, bool, bool], device: torch.device, backend: str
) -> None:
    layer = linear(7, 5, device)
    layer.weight.requires_grad_(needs[1])
    layer.bias.requires_grad_(needs[2])
    fn, _ = compiled(layer, backend)
    x, dy = inputs(6, 7, 5, device, grad=needs[0])
    params = [layer.weight, layer.bias]
    assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))


@pytest.mark.parametrize("mode", ["mark_dynamic", "automatic", "dynamic=True"])
def test_dynamic_batch(mode: str, device: torch.device, backend: str) -> None:
    layer = linear(8, 4, device)
    params = list(layer.parameters())
    fn, count = compiled(layer, backend, dynamic=True if mode == "dynamic=True" else None)

    def run(rows: int) -> None:
        x, dy = inputs(rows, 8, 4, device)
        want = step(layer, x, dy, params)
        leaf = x.detach().clone().requires_grad_()
        if mode == "mark_dynamic" and rows > 1:
            torch._dynamo.mark_dynamic(leaf, 0)
        for p in params:
            p.grad = None
        y = fn(leaf)
        y.backward(dy)
        assert_same_bits([y.detach(), leaf.grad, *(p.grad for p in params)], want)

    for rows in (16, 32, 48, 17, 5):
        run(rows)
    graphs = count.frame_count
    assert graphs == (2 if mode == "automatic" else 1)  # automatic: the first size was compiled as a constant
    for rows in (0, 1):
        run(rows)
    assert count.frame_count <= graphs + 2


def test_n_dimensional_and_dynamic(device: torch.device, backend: str) -> None:
    layer = linear(8, 4, device)
    params = list(layer.parameters())
    fn, count = compiled(layer, backend, dynamic=True)
    for batch, tokens in ((2, 3), (4, 5), (3, 7)):
        x, dy = (
            torch.randn(batch, tokens, 8, device=device, requires_grad=True),
            torch.randn(batch, tokens, 4, device=device),
        )
        assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
    assert count.frame_count == 1


def test_train_eval_and_no_grad_do_not_recompile(device: torch.device, backend: str) -> None:
    layer = linear(8, 4, device)
    fn, count = compiled(layer, backend)
    x, dy = inputs(6, 8, 4, device)
    params = list(layer.parameters())
    for _ in range(3):
        layer.train()
        assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
        layer.eval()
        with torch.no_grad():
            assert_same_bits([fn(x)], [layer(x)])
        assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
    assert count.frame_count <= 3  # train, eval, no_grad


def test_train_eval_train_is_never_stale(device: torch.device, backend: str) -> None:
    layer = linear(8, 4, device)
    fn, _ = compiled(layer, backend)
    params = list(layer.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for phase in ("train", "eval", "train", "eval"):
        layer.train(phase == "train")
        x, dy = inputs(6, 8, 4, device)
        assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
        if phase == "train":
            optimizer.step()


def test_64_identical_blocks_share_a_graph(device: torch.device) -> None:
    blocks = [linear(8, 8, device) for _ in range(64)]

    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x = torch.randn(4, 8, device=device)
    seen = []
    for inner in blocks:
        block = Block(inner)
        block.compile(fullgraph=True, backend=counter)
        assert torch.equal(block(x), inner(x).relu())
        seen.append(counter.frame_count)
    assert seen[-1] == seen[1], f"graphs compiled after each block: {seen}"


@pytest.mark.parametrize("option", ["return_bias", "parameters_split"])
def test_options(option: str, device: torch.device, backend: str) -> None:
    kwargs: dict[str, Any] = {
        "return_bias": {"return_bias": True},
        "parameters_split": {"parameters_split": ("a", "b")},
    }[option]
    layer = linear(8, 6, device, **kwargs)

    fn, count = compiled(layer, backend)
    x, dy = inputs(5, 8, 6, device)
    params = list(layer.parameters())
    assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
    assert count.frame_count == 1
    if option == "return_bias":
        assert torch.equal(fn(x)[1], layer.bias)


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
def test_autocast(amp_dtype: torch.dtype, device: torch.device, backend: str) -> None:
    layer = linear(8, 6, device)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, amp_dtype):
            return layer(x)

    fn, count = compiled(call, backend)
    x, dy = (
        torch.randn(5, 8, device=device, requires_grad=True),
        torch.randn(5, 6, device=device).to(amp_dtype),
    )
    params = list(layer.parameters())
    assert_same_bits(step(fn, x, dy, params), step(call, x, dy, params))
    assert count.frame_count == 1


def test_non_contiguous_inputs_keep_their_strides(device: torch.device, backend: str) -> None:
    layer = linear(8, 6, device)
    fn, _ = compiled(layer, backend)
    params = list(layer.parameters())
    x = torch.randn(8, 5, device=device).t().requires_grad_()
    dy = torch.randn(1, 6, device=device).expand(5, 6)
    assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))


def test_errors_come_while_tracing() -> None:
    layer = linear(8, 6, torch.device("cpu"))
    fn, _ = compiled(layer, "aot_eager")
    with pytest.raises(Exception, match=r"te_ops::linear_fwd: x\[1\] = 9: must be 8, which is K = w\[1\]"):
        fn(torch.randn(5, 9))
    assert fn(torch.randn(5, 8)).shape == (5, 6)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, device: torch.device) -> None:
    layer = linear(8, 6, device)
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        program = torch.export.export(
            layer, (torch.randn(4, 8, device=device),), dynamic_shapes=({0: batch},), strict=strict
        )
    x = torch.randn(9, 8, device=device)
    assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, device: torch.device) -> None:
    model = nn.Sequential(linear(8, 16, device), nn.GELU(), linear(16, 8, device))
    params = list(model.parameters())

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)

    fn, _ = compiled(call, "aot_eager")
    x, dy = inputs(5, 8, 8, device)
    want = step(model, x, dy, params)
    assert_same_bits(step(call, x, dy, params), want)
    assert_same_bits(step(fn, x, dy, params), want)


@pytest.mark.full
@pytest.mark.inductor
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_overhead(dtype: torch.dtype, cuda: torch.device) -> None:
    """CUDA graphs record and replay; none is skipped; a replay has the bits of eager."""
    layer = linear(64, 32, cuda, dtype)
    params = list(layer.parameters())
    fn = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    for _ in range(6):
        x, dy = inputs(16, 64, 32, cuda, dtype)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(step(fn, x, dy, params), step(layer, x, dy, params))
    assert counters.get("cudagraph_skips", 0) == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.compiler.cudagraph_mark_step_begin()
        step(fn, x, dy, params)
    replays = [e.name for e in profile.events() if "cudaGraphLaunch" in e.name or "cuGraphLaunch" in e.name]
    if not replays:
        warnings.warn(
            "the profiler shows no graph launches: cannot tell that CUDA graphs were replayed", stacklevel=1
        )


@pytest.mark.parametrize("train", [True, False])
def test_manual_cuda_graph(train: bool, cuda: torch.device) -> None:
    """A first call inside a capture: no allocation or synchronisation that a capture refuses."""
    layer = linear(96, 48, cuda, torch.bfloat16)
    x, dy = inputs(33, 96, 48, cuda, torch.bfloat16, grad=train)
    params = list(layer.parameters())
    want = step(layer, x, dy, params)
    other = linear(100, 52, cuda, torch.bfloat16)  # sizes that have no plan yet
    x2, dy2 = inputs(35, 100, 52, cuda, torch.bfloat16, grad=train)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(layer, x, dy, params)
    with torch.cuda.graph(graph, stream=stream):
        got = step(layer, x, dy, params)
        got2 = step(other, x2, dy2, list(other.parameters()))
    for t in (*got, *got2):
        t.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(got, want)
    assert_same_bits(got2, step(other, x2, dy2, list(other.parameters())))


def test_import_and_compile_warn_about_nothing(recwarn: pytest.WarningsRecorder) -> None:
    layer = te.Linear(4, 4, device="cpu")
    fn, _ = compiled(layer, "aot_eager")
    fn(torch.randn(2, 4)).sum().backward()
    assert not [w for w in recwarn if "te_ops" in str(w.message)]
