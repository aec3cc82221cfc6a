"""The bundles of the per-tensor FP8 operators, and the operators behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._bundle import bind

W, Y, DX = 1, 2, 4  # tensors of a delayed-scaling state, as the operators number them
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # in the order of the operators' int `dtype`

Quantized = tuple[Tensor, Tensor | None, Tensor]  # codes, transposed codes, scale_inv


class Buffers(NamedTuple):
    """The column copy alone, as backward takes it: ``[K, M]`` for a logical ``[M, K]``."""

    col: Tensor
    scale_inv: Tensor


@dataclass(slots=True, kw_only=True)
class Forward:
    """x ``[*M, K]`` and w ``[N, K]``, each plain or (codes, transposed codes or None, scale_inv)."""

    x: Tensor | Quantized
    w: Tensor | Quantized
    b: Tensor | None
    dtype: int
    save_x: bool
    save_w: bool
    pow2_x: bool
    pow2_w: bool
    fast: bool


@dataclass(slots=True, kw_only=True)
class ForwardDelayed(Forward):
    """And the state with its region (see `_delayed`), which is rolled and staged in."""

    most_recent: bool
    backward_e5m2: bool
    stage: bool
    save_region: bool
    state: Tensor
    region: Tensor
    new_scale: Tensor | None
    history_len: int
    margin: int


@dataclass(slots=True, kw_only=True)
class Backward:
    """dy ``[*M, N]``, plain or quantized; the column copies of x and w where a needed gradient uses them."""

    dy: Tensor | Quantized
    x: Buffers | None
    w: Buffers | None
    dtype: int
    dw_dtype: int
    need_dx: bool
    need_dw: bool
    need_db: bool
    keep_dy: bool
    e5m2: bool
    pow2: bool
    fast_dgrad: bool
    fast_wgrad: bool


@dataclass(slots=True, kw_only=True)
class BackwardDelayed(Backward):
    """And backward's own state, which is rolled and staged in as forward's is."""

    most_recent: bool
    stage: bool
    state: Tensor
    region: Tensor
    new_scale: Tensor | None
    history_len: int
    margin: int


@dataclass(slots=True, kw_only=True)
class BackwardMainGrad(Backward):
    most_recent: bool
    stage: bool
    accumulate: bool
    state: Tensor | None
    region: Tensor | None
    new_scale: Tensor | None
    history_len: int
    margin: int
    main_grad: Tensor | None


@dataclass(slots=True, kw_only=True)
class Wgrad:
    dy: Buffers
    x: Buffers
    dw_dtype: int
    fast: bool


@dataclass(slots=True, kw_only=True)
class WgradInto:
    dy: Buffers
    x: Buffers
    main_grad: Tensor
    accumulate: bool
    fast: bool


@dataclass(slots=True, kw_only=True)
class Quantize:
    x: Tensor
    scale: Tensor | None
    e5m2: bool
    pow2: bool
    want_row: bool
    want_col: bool
    want_amax: bool
    want_sums: bool


@dataclass(slots=True, kw_only=True)
class QuantizeDelayed:
    x: Tensor
    state: Tensor
    region: Tensor
    new_scale: Tensor | None
    history_len: int
    margin: int
    tensor: int
    e5m2: bool
    want_row: bool
    want_col: bool
    most_recent: bool
    backward_e5m2: bool
    stage: bool


@dataclass(slots=True, kw_only=True)
class Calibrate:
    x: Tensor
    w: Tensor
    state: Tensor
    region: Tensor
    new_scale: Tensor | None
    history_len: int
    margin: int
    most_recent: bool
    backward_e5m2: bool


forward = bind("te_ops::linear_fp8_fwd", Forward).direct
forward_delayed = bind("te_ops::linear_fp8_fwd_delayed", ForwardDelayed).direct
backward = bind("te_ops::linear_fp8_bwd", Backward).direct
backward_delayed = bind("te_ops::linear_fp8_bwd_delayed", BackwardDelayed).direct
backward_main_grad = bind("te_ops::linear_fp8_bwd_main_grad", BackwardMainGrad).direct
wgrad = bind("te_ops::linear_fp8_wgrad", Wgrad)
wgrad_into = bind("te_ops::linear_fp8_wgrad_into", WgradInto)
quantize = bind("te_ops::quantize", Quantize)
quantize_delayed = bind("te_ops::quantize_delayed", QuantizeDelayed).direct
calibrate = bind("te_ops::linear_calibrate", Calibrate).direct
