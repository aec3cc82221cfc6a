"""Quantized weights kept over the microbatches of a step (``is_first_microbatch``), and never used when stale.

A cache remembers the weight's version counter and address, in a small CPU tensor. Eager calls compare and quantize
again where they differ. Compiled code compares too, at run time, through an operator that declares the tensor as
mutated so that it is kept; there a difference is an error, since the graph of a later microbatch has no quantizer.
Writes through ``.data`` change neither counter nor address: that is a limit of PyTorch, and so of this cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._bundle import bind
from ._delayed import outside_inference_mode

if TYPE_CHECKING:
    from .linear import Linear

_BUFFERS = ("_cached_row", "_cached_col", "_cached_scale_inv")


class _Into:  # what QuantizeInto.q is: the buffers of the format
    __slots__ = ("col", "row", "scale_inv")

    def __init__(self, row: Tensor, col: Tensor, scale_inv: Tensor) -> None:
        self.row, self.col, self.scale_inv = row, col, scale_inv


@dataclass(slots=True, kw_only=True)
class QuantizeInto:
    """x ``[*M, K]`` into the buffers q; by a given scale ``[1]``, or by current scaling."""

    x: Tensor
    scale: Tensor | None
    q: Any
    pow2: bool


quantize_into = bind("te_ops::quantize_into", QuantizeInto)


def new_token() -> Tensor:
    """[version, address, options] of the cached weight; -1: none."""
    return torch.full((3,), -1, dtype=torch.int64, device="cpu")


def _fingerprint(weight: Tensor, options: int) -> list[int]:
    return [weight._version, weight.data_ptr(), options]


@torch.library.custom_op("te_ops::note_weight", mutates_args=("token",))
def _note(weight: Tensor, token: Tensor, options: int) -> None:
    token.copy_(torch.tensor(_fingerprint(weight, options)))


@torch.library.custom_op("te_ops::check_weight", mutates_args=("token",))
def _check(weight: Tensor, token: Tensor, options: int) -> None:
    if token.tolist() != _fingerprint(weight, options):
        raise RuntimeError(
            "te_ops.Linear: is_first_microbatch=False, but the weight has changed since it was cached (by an optimizer "
            "step, load_state_dict, or an assignment), or was never cached: pass is_first_microbatch=True first"
        )


def is_stale(module: Linear, weight: Tensor, options: int) -> bool:
    """Whether nothing is cached, or another weight is. In eager code only."""
    return bool(module._weight_token.tolist() != _fingerprint(weight, options))  # type: ignore[operator]


def _make_buffers(module: Linear, weight: Tensor) -> None:
    rows, cols = weight.shape
    for name, shape in zip(_BUFFERS, ((rows, cols), (cols, rows)), strict=False):
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=weight.device)
        module.register_buffer(name, codes, persistent=False)
    module.register_buffer(
        _BUFFERS[2], torch.ones(1, dtype=torch.float32, device=weight.device), persistent=False
    )


def cached(
    module: Linear, weight: Tensor, first: bool, scale: Tensor | None, options: int, pow2: bool
) -> Any:
    """(codes, transposed codes, scale_inv) of `weight`: quantized now if `first`, else as they were.

    Args:
        module: whose buffers hold them; they are made at the first call.
        weight: ``[N, K]``.
        first: whether this is the first microbatch of a step.
        scale: the scale of delayed scaling, or None.
        options: what else decides the codes, as one number.
        pow2: round the scale to a power of two.

    Raises:
        RuntimeError: in compiled code, with ``first=False`` and a weight that has changed.
    """
    compiling = torch.compiler.is_compiling()
    token: Any = module._weight_token
    if getattr(module, "_cached_row", None) is None:
        with outside_inference_mode():
            _make_buffers(module, weight)
        first = True
    weight = weight.detach()
    if not first and not compiling:
        first = is_stale(module, weight, options)
    parts: Any = module._cached_row, module._cached_col, module._cached_scale_inv
    if first:
        quantize_into(QuantizeInto(x=weight, scale=scale, q=_Into(*parts), pow2=pow2))
        if not compiling:  # a backward that still waits must fail, not use the new codes
            torch.autograd.graph.increment_version(parts)
        _note(weight, token, options)
    elif compiling:
        _check(weight, token, options)
    return parts


def drop(module: Linear) -> None:
    """Forgets the cached codes and frees their memory."""
    for name in _BUFFERS:
        if name in module._buffers:
            del module._buffers[name]
    module._weight_token.fill_(-1)
