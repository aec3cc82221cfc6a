"""Bad input: an error that names operator, slot, index, value and rule; the next good call works."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Any

import pytest
import te_ops  # noqa: F401
import torch

fwd = torch.ops.te_ops.linear_fwd.default
bwd = torch.ops.te_ops.linear_bwd.default
wgrad = torch.ops.te_ops.linear_wgrad.default


def t(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "last dim": (
        lambda d: fwd(t(896, 712, device=d), t(16, 768, device=d), None),
        r"te_ops::linear_fwd: x\[1\] = 712: must be 768, which is K = w\[1\] \(x has shape \[896, 712\]\)",
    ),
    "bias size": (
        lambda d: fwd(t(2, 4, device=d), t(3, 4, device=d), t(5, device=d)),
        r"linear_fwd: b\[0\] = 5: must be 3, which is N = w\[0\]",
    ),
    "rank of w": (
        lambda d: fwd(t(2, 4, device=d), t(3, 4, 1, device=d), None),
        r"w has 3 dimensions: must have 2 \(w has shape \[3, 4, 1\]\)",
    ),
    "0-d x": (
        lambda d: fwd(t(device=d), t(3, 4, device=d), None),
        r"x has 0 dimensions: must have at least 1",
    ),
    "dtype of w": (
        lambda d: fwd(t(2, 4, device=d), t(3, 4, dtype=torch.bfloat16, device=d), None),
        r"w has dtype bfloat16: must be the dtype of x, float32",
    ),
    "float64": (
        lambda d: fwd(t(2, 4, dtype=torch.float64, device=d), t(3, 4, device=d), None),
        r"x has dtype float64: must be one of bfloat16, float16, float32",
    ),
    "integers": (
        lambda d: fwd(t(2, 4, dtype=torch.int32, device=d), t(3, 4, device=d), None),
        r"x has dtype int32: must be one of",
    ),
    "complex": (
        lambda d: fwd(t(2, 4, dtype=torch.complex64, device=d), t(3, 4, device=d), None),
        r"x has dtype complex64: must be one of",
    ),
    "leading dims": (
        lambda d: bwd(t(2, 3, 4, device=d), t(2, 5, 6, device=d), None, 2),
        r"linear_bwd: x\[1\] = 5: must be 3 as in dy\[1\] \(x has shape \[2, 5, 6\]\)",
    ),
    "number of leading dims": (
        lambda d: bwd(t(6, 4, device=d), t(2, 3, 6, device=d), None, 2),
        r"x has 2 leading dimensions: must have the 1 of dy",
    ),
    "missing operand": (
        lambda d: bwd(t(6, 4, device=d), None, None, 2),
        r"x is absent although need_dw is set",
    ),
    "needless operand": (
        lambda d: bwd(t(6, 4, device=d), t(6, 2, device=d), None, 4),
        r"x is present although need_dw is not set",
    ),
    "flags": (lambda d: bwd(t(6, 4, device=d), None, None, 12), r"grads = 12: has bits beyond its 3 flags"),
    "strided main_grad": (
        lambda d: wgrad(t(2, 3, device=d), t(2, 4, device=d), t(4, 3, device=d).t(), True),
        r"main_grad is not contiguous: it is updated in place",
    ),
    "main_grad size": (
        lambda d: wgrad(t(2, 3, device=d), t(2, 4, device=d), t(3, 5, device=d), True),
        r"linear_wgrad: x\[1\] = 4: must be 5, which is K = main_grad\[1\]",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_message(name: str, device: torch.device) -> None:
    call, pattern = BAD[name]
    with pytest.raises(RuntimeError, match=pattern) as error:
        call(device)
    assert str(error.value).startswith("te_ops::linear_")
    assert fwd(t(2, 4, device=device), t(3, 4, device=device), None).shape == (2, 3)


def test_sparse(device: torch.device) -> None:
    for x in (torch.eye(4, device=device).to_sparse(), torch.eye(4, device=device).to_sparse_csr()):
        with pytest.raises(RuntimeError, match=r"te_ops::linear_fwd: x is a sparse .*: must be dense"):
            fwd(x, t(3, 4, device=device), None)
        with pytest.raises(RuntimeError, match=r"te_ops::linear_fwd: w is a sparse .*: must be dense"):
            fwd(t(3, 4, device=device), x, None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with pytest.raises(RuntimeError, match=r"te_ops::linear_fwd: x is a nested tensor: must be dense"):
        fwd(nested, t(3, 4), None)
    with pytest.raises(RuntimeError, match=r"te_ops::linear_fwd: w is a nested tensor: must be dense"):
        fwd(t(3, 4), nested, None)


def test_mixed_devices(cuda: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"linear_fwd: w is on cpu: must be on the device of x, cuda:0"):
        fwd(t(2, 4, device=cuda), t(3, 4), None)
    with pytest.raises(RuntimeError, match=r"linear_fwd: w is on cuda:0: must be on the device of x, cpu"):
        fwd(t(2, 4), t(3, 4, device=cuda), None)


def test_sizes_that_overflow() -> None:
    tall, wide = t(1).expand(1 << 40, 1), t(1).expand(1 << 40, 1)
    with pytest.raises(
        RuntimeError, match=r"te_ops::linear_fwd: a result would have more than 2\^63 elements"
    ):
        fwd(tall, wide, None)
    with pytest.raises(RuntimeError, match=r"te_ops::linear_fwd: a result of \d+ elements is too large"):
        fwd(tall, t(1).expand(1 << 22, 1), None)
    with pytest.raises(RuntimeError, match=r"te_ops::linear_fwd: cannot allocate \d+ elements of float32"):
        fwd(tall, t(1 << 10, 1), None)
    no_rows = torch.empty(1 << 31, 0, 1).transpose(0, 1)
    assert fwd(no_rows, t(3, 1), None).shape == (0, 1 << 31, 3)


def test_most_dimensions_that_pytorch_has() -> None:
    assert fwd(t(*([1] * 63), 2), t(3, 2), None).shape == (*([1] * 63), 3)
    with pytest.raises(
        RuntimeError, match=r"x\[63\] = 2: must be 1, which is K = w\[1\] \(x has shape \[1, 1, 1, "
    ):
        fwd(t(*([1] * 63), 2), t(1, 1), None)


def memory(device: torch.device) -> tuple[int, int]:
    gc.collect()
    return resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss, torch.cuda.memory_allocated() if device.type == "cuda" else 0


@pytest.mark.parametrize("calls", [3000, pytest.param(100_000, marks=pytest.mark.full)])
def test_rejected_calls_leave_memory_flat(calls: int, device: torch.device) -> None:
    """Inputs of 256 KiB each: one leaked argument in a hundred would show."""
    dy, x, w = (t(256, 256, device=device) for _ in range(3))
    bad = t(256, 255, device=device)

    def reject(n: int) -> None:
        for i in range(n):
            fresh = x.clone() if i % 50 == 0 else x
            for call in (
                lambda fresh=fresh: bwd(dy, fresh, bad, 3),
                lambda: fwd(bad, w, None),
                lambda: wgrad(dy, x, bad, True),
            ):
                try:
                    call()
                except RuntimeError:
                    continue
                raise AssertionError("accepted")

    reject(300)
    before = memory(device)
    reject(calls // 3)
    after = memory(device)
    assert after[0] - before[0] < 2048, "KiB of host memory"
    assert after[1] == before[1]
    assert fwd(x, w, None).shape == (256, 256)
