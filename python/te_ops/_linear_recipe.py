"""`Linear.forward` where a recipe is active or something is quantized: from modules and recipes to operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _delayed, _weight_cache
from ._autocast import region
from ._autocast import state as active
from ._fp8_ops import DTYPES, W, Y, calibrate, quantize_delayed
from ._linear_fp8 import LinearFP8, Options, quantized, run_forward
from .quantized_tensor import QuantizedTensor
from .recipe import Format, Recipe

if TYPE_CHECKING:
    from .linear import Linear

_DTYPE_INDEX = {dtype: i for i, dtype in enumerate(DTYPES)}


def _options(
    recipe: Any,
    module: Linear,
    dtype: torch.dtype,
    dw_dtype: torch.dtype,
    accumulate: bool,
    quantize_dx: bool,
) -> Options:
    # A reentrant checkpoint runs its forward without gradients, and it is the forward that counts.
    stage = torch.is_grad_enabled() or active.calibrating or active.checkpoint is not None
    hybrid = recipe.fp8_format is Format.HYBRID
    if dtype not in _DTYPE_INDEX or dw_dtype not in _DTYPE_INDEX:
        raise TypeError(
            f"te_ops.Linear: inp is {dtype} and the weight {dw_dtype}: under a recipe each must be one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    y_type, dw_type = _DTYPE_INDEX[dtype], _DTYPE_INDEX[dw_dtype]
    if recipe.delayed():
        return Options(
            delayed=True,
            e5m2=hybrid,
            pow2_x=False,
            pow2_w=False,
            pow2_dy=False,
            fast_fprop=True,  # and split accumulation in backward: Transformer Engine's choice
            fast_dgrad=False,
            fast_wgrad=False,
            most_recent=recipe.amax_compute_algo == "most_recent",
            history_len=recipe.amax_history_len,
            margin=recipe.margin,
            stage=stage,
            dtype=y_type,
            dw_dtype=dw_type,
            save_original=False,
            accumulate=accumulate,
            quantize_dx=quantize_dx,
        )
    pow2_x, pow2_w, pow2_dy = recipe.power_2_scales()
    return Options(
        delayed=False,
        e5m2=hybrid,
        pow2_x=pow2_x,
        pow2_w=pow2_w,
        pow2_dy=pow2_dy,
        fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
        fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
        fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
        most_recent=False,
        history_len=1,
        margin=0,
        stage=stage,
        dtype=y_type,
        dw_dtype=dw_type,
        save_original=module.save_original_input,
        accumulate=accumulate,
        quantize_dx=quantize_dx,
    )


def _state(module: Linear, recipe: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """State, region counter and scales by a user's function; all None without delayed scaling."""
    if not recipe.delayed():
        return None, None, None
    if module._history_len != recipe.amax_history_len:
        for name in _delayed.BUFFERS:
            old = getattr(module, name)
            setattr(module, name, _delayed.resize(old, module._history_len, recipe.amax_history_len))
        module._history_len = recipe.amax_history_len
    state = module._fp8_state
    return state, region(state.device), _delayed.computed_scales(state, recipe)


class _Dequantize(torch.autograd.Function):
    """A quantized tensor in its nominal dtype; gradients pass."""

    @staticmethod
    def forward(ctx: Any, t: Any) -> Tensor:  # type: ignore[override]
        result: Tensor = t.dequantize()
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


class _QuantizeOutput(torch.autograd.Function):
    """y as codes; its gradient passes, as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, state: Any, region_: Any, new_scale: Any, o: Options) -> Any:  # type: ignore[override]
        return quantized(y, state, region_, new_scale, o, Y, False, o.pow2_x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:  # type: ignore[override]
        return dy, None, None, None, None


_NO_BUFFERS = (None, None, None)  # row, col, scale_inv


def _cached_weight(
    module: Linear, weight: Tensor, first: bool, state: Any, region_: Any, new_scale: Any, o: Options
) -> Any:
    """The codes of the weight over the microbatches of a step. Under delayed scaling its amax is staged with them."""
    if not o.delayed:
        return _weight_cache.cached(module, weight, first, None, int(o.pow2_w), o.pow2_w)
    stale = not torch.compiler.is_compiling() and _weight_cache.is_stale(module, weight, 2)
    if first or stale:
        with torch.no_grad():  # rolls the state and stages the amax; the codes of this one pass are not kept
            quantize_delayed(
                weight.detach(), state, region_, new_scale, o.history_len, o.margin, W, False, True, False,
                o.most_recent, o.e5m2, o.stage,
            )  # fmt: skip
    return _weight_cache.cached(module, weight, first, _delayed.scales(state)[W : W + 1], 2, False)


def _activation_dtype(inp: Tensor) -> torch.dtype:
    # Without an argument it asks for CUDA, in half the time.
    if torch.is_autocast_enabled() if inp.is_cuda else torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype(inp.device.type)
    return inp.dtype


def plain(t: Any) -> Any:
    return _Dequantize.apply(t) if isinstance(t, QuantizedTensor) else t


def stage_amaxes(module: Linear, inp: Tensor, weight: Tensor, recipe: Recipe) -> None:
    """Calibration: what this call would quantize, as amaxes in the state of delayed scaling."""
    if not recipe.delayed():
        return
    state, region_, new_scale = _state(module, recipe)
    o = _options(recipe, module, DTYPES[0], DTYPES[0], False, False)
    with torch.no_grad():
        calibrate(inp.detach(), weight.detach(), state, region_, new_scale, o.history_len, o.margin, o.most_recent,
                  o.e5m2)  # fmt: skip


def forward_fp8(
    module: Linear,
    inp: Any,
    weight: Any,
    bias: Tensor | None,
    recipe: Recipe,
    is_first_microbatch: bool | None,
    fp8_output: bool,
    fp8_grad: bool,
) -> Any:
    """y of one layer under a per-tensor FP8 recipe."""
    dtype = _activation_dtype(inp)
    is_plain = not isinstance(inp, QuantizedTensor)
    if is_plain and inp.dtype != dtype:
        inp = inp.to(dtype)
    b = bias if bias is None or bias.dtype == dtype else bias.to(dtype)
    state, region_, new_scale = _state(module, recipe)
    if state is not None and active.checkpoint is not None:
        state, region_ = active.checkpoint.state(state, region_)
    o = _options(recipe, module, dtype, weight.dtype, is_first_microbatch is not True, fp8_grad)
    x_parts = _NO_BUFFERS if is_plain else inp.te_buffers()
    w_parts = weight.te_buffers() if isinstance(weight, QuantizedTensor) else _NO_BUFFERS
    w_col_scale_inv: Tensor | None = None  # where it is a tensor of its own
    if is_first_microbatch is not None and w_parts[0] is None and not module._is_split:
        row, scale_inv, col, w_col_scale_inv = _cached_weight(
            module, weight, is_first_microbatch, state, region_, new_scale, o
        )
        w_parts = row, col, scale_inv
    if not torch.is_grad_enabled():
        x, w = inp if is_plain else x_parts, weight if w_parts[0] is None else w_parts
        y, *_ = run_forward(x, w, b, state, region_, new_scale, o, False, False, False)
        return quantized(y, state, region_, new_scale, o, Y, False, o.pow2_x) if fp8_output else y
    backward_state = backward_new_scale = None
    if state is not None:
        backward_state = module._fp8_backward_state
        backward_new_scale = _delayed.computed_scales(backward_state, recipe)
    token = module._wgrad_token
    fused = module.fuse_wgrad_accumulation and token is None and weight.requires_grad
    main_grads = module._main_grads() if fused else ()
    y = LinearFP8.apply(
        inp,
        weight,
        b,
        *x_parts,
        *w_parts,
        w_col_scale_inv,
        state,
        region_,
        new_scale,
        backward_state,
        backward_new_scale,
        token,
        o,
        *main_grads,
    )
    return _QuantizeOutput.apply(y, state, region_, new_scale, o) if fp8_output else y
