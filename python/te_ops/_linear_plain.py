"""A linear layer without a recipe: argument bundles of its operators and its autograd functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from . import _deferred
from ._bundle import bind
from ._fp8_ops import DTYPES, Buffers, Wgrad, WgradInto, wgrad, wgrad_into
from ._seal import must_seal, seal


@dataclass(slots=True, kw_only=True)
class LinearForward:
    """Arguments of the forward operator: x ``[*M, K]``, w ``[N, K]``, b ``[N]`` or None."""

    x: Tensor
    w: Tensor
    b: Tensor | None


@dataclass(slots=True, kw_only=True)
class LinearBackward:
    """Arguments of the backward operator; x and w are None where no needed gradient uses them."""

    dy: Tensor
    x: Tensor | None
    w: Tensor | None
    need_dx: bool
    need_dw: bool
    need_db: bool


@dataclass(slots=True, kw_only=True)
class LinearWgrad:
    """Arguments of the weight gradient into a buffer: main_grad ``[N, K]`` is updated in place."""

    dy: Tensor
    x: Tensor
    main_grad: Tensor
    accumulate: bool


linear_fwd = bind("te_ops::linear_fwd", LinearForward)
linear_bwd = bind("te_ops::linear_bwd", LinearBackward)
linear_wgrad = bind("te_ops::linear_wgrad", LinearWgrad)

forward, _backward = linear_fwd.direct, linear_bwd.direct  # without a bundle: for every layer and step


def _wgrad_into(main_grads: Sequence[Tensor], dy: Tensor, x: Tensor, accumulate: bool) -> None:
    """Adds dy^T x to (or stores it in) the parts of the weight's gradient buffer, one after another."""
    if len(main_grads) == 1:
        linear_wgrad(LinearWgrad(dy=dy, x=x, main_grad=main_grads[0], accumulate=accumulate))
        return
    sizes = [grad.shape[0] for grad in main_grads]
    for part, grad in zip(dy.split(sizes, dim=-1), main_grads, strict=True):
        linear_wgrad(LinearWgrad(dy=part, x=x, main_grad=grad, accumulate=accumulate))


def deferred_product(entry: _deferred.Entry, dtype: torch.dtype) -> Tensor:
    """The weight gradient of a backward that waited."""
    if entry.x_scale_inv is None or entry.dy_scale_inv is None:
        _, dw, _ = linear_bwd(
            LinearBackward(dy=entry.dy, x=entry.x, w=None, need_dx=False, need_dw=True, need_db=False)
        )
    else:
        dy, x = Buffers(entry.dy, entry.dy_scale_inv), Buffers(entry.x, entry.x_scale_inv)
        dw = wgrad(Wgrad(dy=dy, x=x, dw_dtype=DTYPES.index(dtype), fast=entry.fast))
    return cast(Tensor, dw)


def deferred_into(entry: _deferred.Entry, main_grads: Sequence[Tensor]) -> None:
    if entry.x_scale_inv is None or entry.dy_scale_inv is None:
        _wgrad_into(main_grads, entry.dy, entry.x, entry.accumulate)
        return
    x, rows = Buffers(entry.x, entry.x_scale_inv), [grad.shape[0] for grad in main_grads]
    for dy, grad in zip(entry.dy.split(rows), main_grads, strict=True):
        part = Buffers(dy, entry.dy_scale_inv)
        wgrad_into(WgradInto(dy=part, x=x, main_grad=grad, accumulate=entry.accumulate, fast=entry.fast))


class LinearPlain(torch.autograd.Function):
    """The usual case: every gradient goes to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, w if needs[0] else None)
        y: Tensor = forward(x, w, b)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad
        grads = _backward(dy, x, w, need_dx=need_dx, need_dw=need_dw, need_db=need_db)
        return seal(grads, dy, x, w) if must_seal() else grads


apply_linear = LinearPlain.apply


class LinearWgradElsewhere(torch.autograd.Function):
    """The weight gradient goes into `main_grads`, or waits in the queue of `token` for `backward_dw()`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        token: Tensor | None,
        accumulate: bool,
        *main_grads: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, w if needs[0] else None)
        ctx.token = token
        ctx.accumulate = accumulate
        ctx.main_grads = main_grads
        y: Tensor = forward(x, w, b)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = db = None
        if need_dx or need_db:
            dx, _, db = linear_bwd(
                LinearBackward(dy=dy, x=None, w=w, need_dx=need_dx, need_dw=False, need_db=need_db)
            )
        if need_dw and ctx.token is None:
            _wgrad_into(ctx.main_grads, dy, x, ctx.accumulate)
        elif need_dw:
            # autograd may go on adding to dy's memory; x is the caller's, and is checked when it is used
            _deferred.put(
                _deferred.Entry(dy.detach().clone(), None, x.detach(), None, ctx.accumulate, False), ctx.token
            )
        if must_seal():
            dx, db = seal((dx, db), dy, x, w)
        return (dx, None, db, None, None, *(None for _ in ctx.main_grads))
