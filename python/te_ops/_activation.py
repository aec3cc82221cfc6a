"""Activations: their operators, what modules accept as ``activation`` and ``activation_params``, and autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _C
from ._bundle import bind
from ._seal import must_seal, seal

ACTIVATIONS = tuple(name for name, _ in _C.activations())
_IS_GATED = tuple(gated for _, gated in _C.activations())

# Of clamped_swiglu, which alone takes some: Transformer Engine's names and defaults.
_PARAMS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


@dataclass(slots=True, kw_only=True)
class ActivationForward:
    """x ``[*M, F]``, or ``[*M, 2F]`` of a gated kind: first what is activated, then what it is multiplied with."""

    x: Tensor
    kind: int
    limit: float
    alpha: float
    offset: float


@dataclass(slots=True, kw_only=True)
class ActivationBackward:
    """dy ``[*M, F]`` and forward's x; `need_db`: also the sums over rows of dx."""

    dy: Tensor
    x: Tensor
    kind: int
    limit: float
    alpha: float
    offset: float
    need_db: bool


_activation_fwd = bind("te_ops::activation_fwd", ActivationForward).direct
_activation_bwd = bind("te_ops::activation_bwd", ActivationBackward).direct
_gated_fwd = bind("te_ops::gated_fwd", ActivationForward).direct
_gated_bwd = bind("te_ops::gated_bwd", ActivationBackward).direct


class Kind(NamedTuple):
    """An activation with its parameters, as `check` makes it."""

    number: int  # in ACTIVATIONS, as the operators count them
    is_gated: bool
    limit: float
    alpha: float
    offset: float


def check(name: str, params: Mapping[str, Any] | None = None) -> Kind:
    """The activation called `name` with `params` (``activation_params`` of a module).

    Raises:
        ValueError: an unknown name, parameters that it does not take, or values that cannot work.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r}: must be one of {', '.join(ACTIVATIONS)}")
    takes = _PARAMS if name == "clamped_swiglu" else {}
    for key, value in (params or {}).items():
        if key not in takes:
            raise ValueError(
                f"activation_params has {key!r}: {name} takes {', '.join(takes) if takes else 'no parameters'}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise ValueError(f"activation_params[{key!r}]={value!r}: must be a finite number")
        if key in ("limit", "alpha") and value <= 0:
            raise ValueError(f"activation_params[{key!r}]={value!r}: must be positive")
    values = {key: float(value) for key, value in {**_PARAMS, **(params or {})}.items()}
    number = ACTIVATIONS.index(name)
    return Kind(number, _IS_GATED[number], values["limit"], values["alpha"], values["glu_linear_offset"])


def forward(x: Tensor, kind: Kind) -> Tensor:
    """y ``[*M, F]``, which autograd does not follow."""
    op = _gated_fwd if kind.is_gated else _activation_fwd
    y: Tensor = op(x, kind.number, kind.limit, kind.alpha, kind.offset)
    return y


def backward(dy: Tensor, x: Tensor, kind: Kind, need_db: bool) -> tuple[Tensor, Tensor | None]:
    """dx, and the gradient of a bias that was added to x."""
    op = _gated_bwd if kind.is_gated else _activation_bwd
    grads: tuple[Tensor, Tensor | None] = op(dy, x, kind.number, kind.limit, kind.alpha, kind.offset, need_db)
    return grads


class Activation(torch.autograd.Function):
    """``Activation.apply(x, kind)``; what it saves is x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Kind) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return forward(x, kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx: Tensor | None = backward(dy, x, ctx.kind, False)[0]
        if must_seal():
            (dx,) = seal((dx,), dy, x)
        return dx, None
