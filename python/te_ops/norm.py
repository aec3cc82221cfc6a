"""`LayerNorm` and `RMSNorm`: `torch.nn`'s state dicts, Transformer Engine's ``zero_centered_gamma``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._bundle import bind
from ._fp8_ops import DTYPES
from ._module import Module, default_device, refuse
from ._seal import must_seal, seal


@dataclass(slots=True, kw_only=True)
class LayerNormForward:
    """x ``[*M, K]``, gamma and beta ``[K]``; `save`: also mean and rstd ``[M]``, which backward needs."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    eps: float
    zero_centered: bool
    save: bool


@dataclass(slots=True, kw_only=True)
class LayerNormBackward:
    """dy and x ``[*M, K]``, and what forward saved."""

    dy: Tensor
    x: Tensor
    gamma: Tensor
    mean: Tensor
    rstd: Tensor
    zero_centered: bool
    need_dx: bool
    need_dgamma: bool
    need_dbeta: bool


@dataclass(slots=True, kw_only=True)
class RMSNormForward:
    """x ``[*M, K]``, gamma ``[K]``; `save`: also rstd ``[M]``."""

    x: Tensor
    gamma: Tensor
    eps: float
    zero_centered: bool
    save: bool


@dataclass(slots=True, kw_only=True)
class RMSNormBackward:
    """dy and x ``[*M, K]``, and what forward saved."""

    dy: Tensor
    x: Tensor
    gamma: Tensor
    rstd: Tensor
    zero_centered: bool
    need_dx: bool
    need_dgamma: bool


_layernorm_fwd = bind("te_ops::layernorm_fwd", LayerNormForward).direct
_layernorm_bwd = bind("te_ops::layernorm_bwd", LayerNormBackward).direct
_rmsnorm_fwd = bind("te_ops::rmsnorm_fwd", RMSNormForward).direct
_rmsnorm_bwd = bind("te_ops::rmsnorm_bwd", RMSNormBackward).direct


class _LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, eps: float, zero_centered: bool) -> Tensor:
        y, mean, rstd = _layernorm_fwd(x, gamma, beta, eps, zero_centered, True)
        ctx.save_for_backward(x, gamma, mean, rstd)
        ctx.zero_centered = zero_centered
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        grads = _layernorm_bwd(dy, *saved, ctx.zero_centered, *ctx.needs_input_grad[:3])
        if must_seal():
            grads = seal(grads, dy, *saved[:2])
        return (*grads, None, None)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> Tensor:
        y, rstd = _rmsnorm_fwd(x, gamma, eps, zero_centered, True)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.zero_centered = zero_centered
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        grads = _rmsnorm_bwd(dy, *saved, ctx.zero_centered, *ctx.needs_input_grad[:2])
        if must_seal():
            grads = seal(grads, dy, *saved[:2])
        return (*grads, None, None)


_apply_layernorm, _apply_rmsnorm = _LayerNormFunction.apply, _RMSNormFunction.apply


class _Norm(Module):
    """What both have: a weight, the shape it normalizes, and the judgement of arguments and inputs."""

    weight: Tensor

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        sequence_parallel: bool,
        dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        device: torch.device | str | int | None,
        has_bias: bool,
    ) -> None:
        super().__init__()
        name = f"te_ops.{type(self).__name__}"
        refuse(
            name,
            sequence_parallel=(sequence_parallel, False, "sequence parallelism is not in this version"),
        )
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(
                f"{name}: normalized_shape={normalized_shape!r}: must be an integer >= 0 or a sequence of such"
            )
        if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
            raise ValueError(f"{name}: eps={eps!r}: must be a number >= 0")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            raise ValueError(f"{name}: dtype={dtype}: must be one of {', '.join(map(str, DTYPES))}")
        self.normalized_shape = shape
        self.eps = float(eps)
        self.zero_centered_gamma = zero_centered_gamma
        where = default_device() if device is None else torch.device(device)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=where))
        if has_bias:
            self.register_parameter("bias", nn.Parameter(torch.empty(shape, dtype=dtype, device=where)))
        if where.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """gamma becomes one (zero where ``zero_centered_gamma`` adds one to it), beta zero."""
        if defer_init:
            return
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            bias = getattr(self, "bias", None)
            if bias is not None:
                bias.zero_()

    def _rows(self, inp: Tensor) -> Tensor:
        """`inp` with its normalized dims as one."""
        shape = self.normalized_shape
        if tuple(inp.shape[-len(shape) :]) != shape:
            raise RuntimeError(
                f"te_ops.{type(self).__name__}: inp has shape {list(inp.shape)}: its last dims must be "
                f"{list(shape)}, the normalized_shape"
            )
        return inp if len(shape) == 1 else inp.flatten(-len(shape))

    def extra_repr(self) -> str:
        shape = self.normalized_shape if len(self.normalized_shape) > 1 else self.normalized_shape[0]
        return f"{shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(variance + eps) * gamma + beta over the last dims (Ba et al. 2016, arXiv:1607.06450).

    Mean, variance and everything up to the one rounding at the end are fp32. y has the dtype of x; gamma and beta may
    have another, so fp32 parameters work under bf16 activations, and ``torch.autocast`` changes nothing. State dicts
    are those of `torch.nn.LayerNorm`, both ways.

    Args:
        normalized_shape: the last dims of the input, an int or a sequence.
        eps: added to the variance.
        sequence_parallel: only False works in this version.
        dtype: of the parameters (bf16, fp16, fp32); None is `torch.get_default_dtype()`.
        zero_centered_gamma: 1 + gamma takes gamma's place, which starts at zero.
        device: of the parameters. None: that of an enclosing ``with torch.device(...)``, else CUDA if there is one,
            else CPU.

    Raises:
        ValueError: an argument has a value that cannot work; the message names it.
    """

    bias: Tensor

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel, dtype, zero_centered_gamma, device, True)

    def forward(self, inp: Tensor) -> Tensor:
        """y of the shape and dtype of `inp` ``[*, *normalized_shape]``, which is bf16, fp16 or fp32.

        Raises:
            RuntimeError: a wrong dtype, device or size; the message names slot, value and rule.
        """
        x, gamma, beta = self._rows(inp), self.weight.flatten(), self.bias.flatten()
        if torch.is_grad_enabled():
            y = _apply_layernorm(x, gamma, beta, self.eps, self.zero_centered_gamma)
        else:
            y, _, _ = _layernorm_fwd(x, gamma, beta, self.eps, self.zero_centered_gamma, False)
        result: Tensor = y.view(inp.shape)
        return result


class RMSNorm(_Norm):
    """y = x / sqrt(mean of squares + eps) * gamma over the last dims (Zhang and Sennrich 2019, arXiv:1910.07467).

    The mean of squares and everything up to the one rounding at the end are fp32. y has the dtype of x; gamma may have
    another. State dicts are those of `torch.nn.RMSNorm`, both ways. Arguments are those of `LayerNorm`.

    Raises:
        ValueError: an argument has a value that cannot work; the message names it.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel, dtype, zero_centered_gamma, device, False)

    def forward(self, inp: Tensor) -> Tensor:
        """y of the shape and dtype of `inp` ``[*, *normalized_shape]``, which is bf16, fp16 or fp32.

        Raises:
            RuntimeError: a wrong dtype, device or size; the message names slot, value and rule.
        """
        x, gamma = self._rows(inp), self.weight.flatten()
        if torch.is_grad_enabled():
            y = _apply_rmsnorm(x, gamma, self.eps, self.zero_centered_gamma)
        else:
            y, _ = _rmsnorm_fwd(x, gamma, self.eps, self.zero_centered_gamma, False)
        result: Tensor = y.view(inp.shape)
        return result
