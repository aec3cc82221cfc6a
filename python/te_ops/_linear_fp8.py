"""`Linear` in per-tensor FP8: what a recipe asks for, and the autograd around the operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _deferred
from ._fp8_ops import (
    DX,
    Buffers,
    Quantize,
    backward,
    backward_delayed,
    backward_main_grad,
    forward,
    forward_delayed,
    quantize,
    quantize_delayed,
)
from ._seal import must_seal, seal
from .quantized_tensor import QuantizedTensor


class Options(NamedTuple):
    """What a recipe and a call ask of the operators. Plain values only: compiled code guards on them."""

    delayed: bool
    e5m2: bool  # the format of gradients
    pow2_x: bool
    pow2_w: bool
    pow2_dy: bool
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    most_recent: bool
    history_len: int
    margin: int
    stage: bool
    dtype: int  # of activations
    dw_dtype: int
    save_original: bool
    accumulate: bool
    quantize_dx: bool


def operand(t: Tensor, row: Tensor | None, col: Tensor | None, scale_inv: Tensor | None) -> Any:
    return t if row is None else (row, col, scale_inv)


def run_forward(
    x: Any,
    w: Any,
    b: Tensor | None,
    state: Tensor | None,
    region: Tensor | None,
    new_scale: Tensor | None,
    o: Options,
    save_x: bool,
    save_w: bool,
    save_region: bool,
) -> Any:
    """(y, column copy of x, column copy of w, a copy of region); the copies are None where not wanted."""
    if not o.delayed:
        return *forward(x, w, b, o.dtype, save_x, save_w, o.pow2_x, o.pow2_w, o.fast_fprop), None
    return forward_delayed(
        x, w, b, o.dtype, save_x, save_w, o.pow2_x, o.pow2_w, o.fast_fprop, o.most_recent, o.e5m2, o.stage,
        save_region, state, region, new_scale, o.history_len, o.margin,
    )  # fmt: skip


def quantized(
    x: Tensor, state: Any, region: Any, new_scale: Any, o: Options, tensor: int, e5m2: bool, pow2: bool
) -> QuantizedTensor:
    """x, one of the tensors of a delayed-scaling state, as codes."""
    if o.delayed:
        q = quantize_delayed(
            x, state, region, new_scale, o.history_len, o.margin, tensor, e5m2, True, False, o.most_recent, o.e5m2,
            o.stage,
        )  # fmt: skip
    else:
        q, _, _ = quantize(
            Quantize(x=x, scale=None, e5m2=e5m2, pow2=pow2, want_row=True, want_col=False, want_amax=False,
                     want_sums=False)
        )  # fmt: skip
    return QuantizedTensor(q.row, None, q.scale_inv, dtype=x.dtype, pow2=pow2)


class LinearFP8(torch.autograd.Function):
    """One layer in FP8. Arguments: x, w, b for autograd; the buffers of what is quantized already; the rest."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        x_row: Tensor | None,
        x_col: Tensor | None,
        x_scale_inv: Tensor | None,
        w_row: Tensor | None,
        w_col: Tensor | None,
        w_scale_inv: Tensor | None,
        w_col_scale_inv: Tensor | None,
        state: Tensor | None,
        region: Tensor | None,
        new_scale: Tensor | None,
        backward_state: Tensor | None,
        backward_new_scale: Tensor | None,
        token: Tensor | None,
        o: Options,
        *main_grads: Tensor,
    ) -> Tensor:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        original = need_dw and o.save_original and x_row is None
        save_x = need_dw and x_col is None and not original
        save_w = need_dx and w_col is None
        y, xq, wq, seen = run_forward(
            operand(x, x_row, x_col, x_scale_inv), operand(w, w_row, w_col, w_scale_inv), b,
            state, region, new_scale, o, save_x, save_w, True,
        )  # fmt: skip
        if save_x:
            x_col, x_scale_inv = xq
        if save_w:
            w_col, w_scale_inv = wq
        ctx.save_for_backward(
            x if original else x_col if need_dw else None,
            x_scale_inv if need_dw and not original else None,
            w_col if need_dx else None,
            (w_scale_inv if w_col_scale_inv is None else w_col_scale_inv) if need_dx else None,
        )
        ctx.original = original
        ctx.state = backward_state
        # The region of this forward, though others may begin before backward. An output of the operator: compiled
        # code would not copy the counter but save it, and find it changed.
        ctx.region = seen
        ctx.new_scale = backward_new_scale
        ctx.token = token
        ctx.options = o
        ctx.main_grads = main_grads
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:  # type: ignore[override]
        x_col, x_scale_inv, w_col, w_scale_inv = ctx.saved_tensors
        o: Options = ctx.options
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        if ctx.original:
            saved = x_col
            x_col, x_scale_inv = _column_copy(saved, o.pow2_x)
        x = Buffers(x_col, x_scale_inv) if need_dw else None
        w = Buffers(w_col, w_scale_inv) if need_dx else None
        g, e5m2 = dy, o.e5m2
        if hasattr(dy, "te_buffers"):  # quantized by the next layer, whose recipe may be another
            g, e5m2 = dy.te_buffers(), dy.codes_dtype == torch.float8_e5m2
        defer = need_dw and ctx.token is not None
        delayed: Any = None
        if o.delayed:
            delayed = (ctx.state, ctx.region, ctx.new_scale, o.history_len, o.margin)
        dw: Any = None
        dyq: Any = None
        if need_dw and len(ctx.main_grads) == 1 and not defer:
            dx, db = backward_main_grad(
                g, x, w, o.dtype, o.dw_dtype, need_dx, need_dw, need_db, False, e5m2, o.pow2_dy, o.fast_dgrad,
                o.fast_wgrad, o.most_recent, o.stage, o.accumulate, *(delayed or (None, None, None, 0, 0)),
                ctx.main_grads[0],
            )  # fmt: skip
        else:
            wants_dw = need_dw and not defer
            dw_dtype = 2 if ctx.main_grads else o.dw_dtype
            args = (
                g, x if wants_dw else None, w, o.dtype, dw_dtype, need_dx, wants_dw, need_db, defer, e5m2,
                o.pow2_dy, o.fast_dgrad, o.fast_wgrad,
            )  # fmt: skip
            if delayed is None:
                dx, dw, db, dyq = backward(*args)
            else:
                dx, dw, db, dyq = backward_delayed(*args, o.most_recent, o.stage, *delayed)
        if defer:
            assert x is not None
            entry = _deferred.Entry(dyq.col, dyq.scale_inv, x.col, x.scale_inv, o.accumulate, o.fast_wgrad)
            _deferred.put(entry, ctx.token)
        if dw is not None and ctx.main_grads:
            _spread(dw, ctx.main_grads, o.accumulate)
            dw = None
        if o.quantize_dx and dx is not None:
            dx = quantized(dx, ctx.state, ctx.region, ctx.new_scale, o, DX, o.e5m2, o.pow2_dy)
        grads: Any = (dx, dw, db)
        if must_seal():
            grads = seal(grads, torch.empty(0, requires_grad=True))  # codes have no history to tie to
        return (*grads, *(None for _ in range(14)), *(None for _ in ctx.main_grads))


def _column_copy(x: Tensor, pow2: bool) -> Buffers:
    q, _, _ = quantize(
        Quantize(
            x=x,
            scale=None,
            e5m2=False,
            pow2=pow2,
            want_row=False,
            want_col=True,
            want_amax=False,
            want_sums=False,
        )
    )
    return Buffers(q.col, q.scale_inv)


def _spread(dw: Tensor, main_grads: tuple[Tensor, ...], accumulate: bool) -> None:
    for part, grad in zip(dw.split([g.shape[0] for g in main_grads]), main_grads, strict=True):
        if accumulate:
            grad.add_(part)
        else:
            grad.copy_(part)
