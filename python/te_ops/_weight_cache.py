"""Quantized weights kept over the microbatches of a step (``is_first_microbatch``), and never used when stale.

Eager code remembers the weight's version counter and address on the host, compares, and quantizes again where they
differ. Writes through ``.data`` change neither: that is a limit of PyTorch, and so of this comparison. Compiled code
and CUDA graphs, whose replays run nothing on the host, compare on the device: a hash of the weight's values is kept
beside its codes, and what has changed in any way is quantized again. That costs one read of the weight.
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

_BUFFERS = (
    "_cached_row",
    "_cached_row_scale_inv",
    "_cached_col",
    "_cached_col_scale_inv",
    "_cached_fingerprint",
)


@dataclass(slots=True, kw_only=True)
class QuantizeInto:
    """x ``[*M, K]`` into the buffers q; by a given scale ``[1]``, or by current scaling."""

    x: Tensor
    scale: Tensor | None
    q: Any
    pow2: bool


@dataclass(slots=True, kw_only=True)
class CacheWeight:
    """x ``[N, K]`` into both copies of a cache; by a given scale ``[1]``, or by current scaling.

    `salt` stands for what else decides the codes.
    """

    x: Tensor
    scale: Tensor | None
    row: Tensor
    row_scale_inv: Tensor
    col: Tensor
    col_scale_inv: Tensor
    fingerprint: Tensor
    salt: int
    pow2: bool


quantize_into = bind("te_ops::quantize_into", QuantizeInto)
cache_weight = bind("te_ops::cache_weight", CacheWeight)
refresh_weight = bind("te_ops::refresh_weight", CacheWeight)

NOTHING = (-1, -1, -1)  # what is cached where nothing is


def _version_of(weight: Tensor, options: int) -> tuple[int, int, int]:
    return weight._version, weight.data_ptr(), options


def _compares_on_device(module: Linear, weight: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return True
    if not module._weight_in_graphs and weight.is_cuda:
        # A graph that is replayed later changes weight and cache without the host, which from now on cannot tell.
        module._weight_in_graphs = torch.cuda.is_current_stream_capturing()
    return module._weight_in_graphs


def is_stale(module: Linear, weight: Tensor, options: int) -> bool:
    """Whether the host knows that nothing is cached, or another weight is."""
    return not _compares_on_device(module, weight) and module._weight_token != _version_of(weight, options)


def make(module: Linear, weight: Tensor) -> None:
    """The buffers of a cache for a weight like this one, without content."""
    if getattr(module, "_cached_row", None) is not None:
        return
    rows, cols = weight.shape

    def codes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=weight.device)

    def one() -> Tensor:
        return torch.ones(1, dtype=torch.float32, device=weight.device)

    fingerprint = torch.zeros(2, dtype=torch.int32, device=weight.device)
    new = codes(rows, cols), one(), codes(cols, rows), one(), fingerprint
    for name, buffer in zip(_BUFFERS, new, strict=True):
        module.register_buffer(name, buffer, persistent=False)


def cached(
    module: Linear, weight: Tensor, first: bool, scale: Tensor | None, options: int, pow2: bool
) -> Any:
    """(codes, their scale_inv, transposed codes, their scale_inv) of `weight`.

    They are quantized now if `first` or if the weight has changed, else they are as they were.

    Args:
        module: whose buffers hold them; they are made at the first call.
        weight: ``[N, K]``.
        first: whether this is the first microbatch of a step.
        scale: the scale of delayed scaling, or None.
        options: what else decides the codes, as one number.
        pow2: round the scale to a power of two.
    """
    if getattr(module, "_cached_row", None) is None:
        with outside_inference_mode():
            make(module, weight)
        first = True
    weight = weight.detach()
    *parts, fingerprint = (getattr(module, name) for name in _BUFFERS)
    row, row_scale_inv, col, col_scale_inv = parts
    on_device = _compares_on_device(module, weight)
    if not on_device and not first and not is_stale(module, weight, options):
        return parts
    arguments = CacheWeight(
        x=weight, scale=scale, row=row, row_scale_inv=row_scale_inv, col=col, col_scale_inv=col_scale_inv,
        fingerprint=fingerprint, salt=options, pow2=pow2,
    )  # fmt: skip
    if on_device and not first:
        refresh_weight(arguments)
        return parts
    cache_weight(arguments)
    if not torch.compiler.is_compiling():  # a backward that still waits must fail, not use the new codes
        torch.autograd.graph.increment_version(parts)
        module._weight_token = _version_of(weight, options)
    return parts


def drop(module: Linear) -> None:
    """Forgets the cached codes and frees their memory."""
    for name in _BUFFERS:
        if name in module._buffers:
            del module._buffers[name]
    module._weight_token = NOTHING
