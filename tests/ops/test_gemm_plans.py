"""The GEMM plan cache and autotuning on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import te_ops as te
import torch
from cases import rand
from helpers import relative_error, tolerance

fwd = torch.ops.te_ops.linear_fwd.default
bwd = torch.ops.te_ops.linear_bwd.default
wgrad = torch.ops.te_ops.linear_wgrad.default


@pytest.fixture
def autotune() -> Iterator[None]:
    te.set_gemm_autotune(8)
    yield
    te.set_gemm_autotune(1)


def check(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    x, w, dy = (rand(*s, dtype=dtype, device=device) for s in ((m, k), (n, k), (m, n)))
    got = [fwd(x, w, None), *bwd(dy, x, w, 7)]
    x, w, dy = x.double(), w.double(), dy.double()
    for g, want in zip(got, (x @ w.t(), dy @ w, dy.t() @ x, dy.sum(0)), strict=True):
        assert relative_error(g, want) < tolerance(dtype, max(m, k, n))


def test_a_known_problem_is_a_hit(cuda: torch.device) -> None:
    check(300, 264, 280, cuda)
    before = te.gemm_cache_info()
    check(300, 264, 280, cuda)
    after = te.gemm_cache_info()
    assert after["misses"] == before["misses"]
    assert after["hits"] > before["hits"]


def test_cache_is_bounded(cuda: torch.device) -> None:
    info = te.gemm_cache_info()
    w = rand(160, 136, dtype=torch.bfloat16, device=cuda)
    for m in range(200, 200 + 2 * info["capacity"]):
        fwd(torch.empty(m, 136, dtype=torch.bfloat16, device=cuda), w, None)
    info = te.gemm_cache_info()
    assert info["capacity"] / 2 < info["size"] <= info["capacity"]
    check(200, 136, 160, cuda)


@pytest.mark.usefixtures("autotune")
def test_autotuned_results_are_right(dtype: torch.dtype, cuda: torch.device) -> None:
    check(520, 392, 264, cuda, dtype)
    dy, x = rand(328, 272, dtype=dtype, device=cuda), rand(328, 216, dtype=dtype, device=cuda)
    grad = rand(272, 216, dtype=torch.float32, device=cuda)
    want = grad.double() + dy.double().t() @ x.double()
    wgrad(dy, x, grad, True)  # timing candidates must not add the product more than once
    assert relative_error(grad, want) < tolerance(torch.float32, 328) * 10


@pytest.mark.usefixtures("autotune")
def test_autotuning_waits_for_the_end_of_a_capture(cuda: torch.device) -> None:
    x, w = (rand(*s, dtype=torch.bfloat16, device=cuda) for s in ((344, 408), (296, 408)))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = fwd(x, w, None)
    graph.replay()
    assert relative_error(y, x.double() @ w.double().t()) < tolerance(torch.bfloat16, 408)
    misses = te.gemm_cache_info()["misses"]
    fwd(x, w, None)
    assert te.gemm_cache_info()["misses"] == misses + 1  # planned again, and timed this time
    fwd(x, w, None)
    assert te.gemm_cache_info()["misses"] == misses + 1


def test_small_gradients_at_the_limit_of_the_small_kernel(dtype: torch.dtype, cuda: torch.device) -> None:
    for size in (1, 31, 32, 33, 127, 128, 129):
        check(size, 128, 128, cuda, dtype)
        check(128, size, 96, cuda, dtype)
        check(64, 128, size, cuda, dtype)
