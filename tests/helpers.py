"""What the tests share: runs of a module, comparisons, poison."""

from __future__ import annotations

import contextlib
import io
import lzma
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import te_ops as te
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# ||a - b|| / ||b|| against float64: one rounding of the result (bf16 keeps 8 bits, so a result of one element
# may be off by 2^-8; over many elements it is less than half of that), and for fp32 the growth of a long sum.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}


def reference_vectors() -> Any:
    """What Transformer Engine computed; see tests/data/README.md."""
    with lzma.open(Path(__file__).parent / "data" / "te_fp8.pt.xz") as file:
        return torch.load(io.BytesIO(file.read()), weights_only=True)


def size_of_product(a: Tensor, b: Tensor) -> Tensor:
    """How large elements of a b are apart from chance, which may make the only one or two of them very small."""
    return (a.abs() @ b.abs()) / max(1, a.shape[-1]) ** 0.5


def relative_error(got: Tensor, want: Tensor, usual: Tensor | None = None) -> float:
    """||got - want|| / ||want||; with `usual`, over its norm if that is larger."""
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.isfinite(got).all(), "a value that is not finite: unwritten output or wrong index"
    scale = want.norm() if usual is None else max(want.norm(), usual.detach().double().cpu().norm())
    return float((got - want).norm() / scale) if scale > 0 else float(got.norm())


def tolerance(dtype: torch.dtype, k: int) -> float:
    return TOLERANCE[dtype] * (max(1.0, (k / 1024) ** 0.5) if dtype == torch.float32 else 1.0)


@contextlib.contextmanager
def poisoned(device: torch.device, *numels: int) -> Iterator[None]:
    """Leaves NaN in the memory that the next allocations of these sizes are likely to get."""
    blocks = [
        torch.full((max(n, 1),), float("nan"), device=device, dtype=torch.float32)
        for n in numels
        for _ in range(4)
    ]
    del blocks
    yield


def linear(
    n_in: int, n_out: int, device: torch.device, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> te.Linear:
    """A Linear whose bias is not zero."""
    layer = te.Linear(n_in, n_out, device=device, params_dtype=dtype, **kwargs)
    for name in layer.bias_names:
        if layer.use_bias:
            nn.init.normal_(getattr(layer, name))
    return layer


def step(
    module: Callable[..., Any], x: Tensor, dy: Tensor, params: Sequence[Tensor], **kwargs: Any
) -> list[Tensor]:
    """[y, dx, gradients of params] of one forward and backward; a missing gradient is an empty tensor."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
    for p in params:
        p.grad = None
    y = module(x, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    if y.requires_grad:
        y.backward(dy)
    grads = [x.grad, *(p.grad for p in params)]
    return [y.detach().clone(), *(torch.empty(0) if g is None else g.clone() for g in grads)]


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, f"result {i}: shape {tuple(a.shape)}, not {tuple(b.shape)}"
        assert torch.equal(a, b), f"result {i} differs by up to {(a.double() - b.double()).abs().max()}"


def compiled(module: Any, backend: str, **kwargs: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The module as one graph, and the counter of graphs compiled."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, fullgraph=True, backend=counter, **kwargs), counter
