"""`Linear`: y = x w^T + b, with Transformer Engine's constructor and `torch.nn.Linear`'s state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _deferred, _delayed, _weight_cache
from ._autocast import region
from ._autocast import state as active
from ._fp8_ops import DTYPES as _DTYPES
from ._linear_plain import LinearWgradElsewhere, apply_linear, deferred_into, deferred_product, forward
from ._linear_recipe import forward_fp8, plain, stage_amaxes
from ._model_init import state as model_init
from ._module import Module, default_device, refuse
from .quantized_tensor import QuantizedTensor, quantize


def _refuse_input(inp: Any) -> None:
    if not isinstance(inp, Tensor):
        raise TypeError(f"te_ops.Linear: inp must be a torch.Tensor, not {type(inp).__name__}")
    raise TypeError("te_ops.Linear: inp is a nested tensor: must be dense; use torch.nested.to_padded_tensor")


def _autocast(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts as autocast does for `torch.nn.functional.linear`; what it leaves alone stays as it is."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type) or x.dtype not in _DTYPES:
        return x, w, b
    dtype = torch.get_autocast_dtype(device_type)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)


def _pow2_weights(recipe: Any) -> bool:
    return not recipe.delayed() and recipe.power_2_scales()[1]


def _split_sizes(parameters_split: Any, out_features: int) -> dict[str, int]:
    """Parameter name prefix -> rows, from Transformer Engine's tuple or dict; "" when not split."""
    if parameters_split is None:
        return {"": out_features}
    if isinstance(parameters_split, Mapping):
        items = [(str(name), int(size)) for name, size in parameters_split.items()]
    else:
        names = [parameters_split] if isinstance(parameters_split, str) else list(parameters_split)
        if not names or out_features % len(names):
            raise ValueError(
                f"te_ops.Linear: parameters_split={parameters_split!r}: out_features={out_features} "
                f"must be divisible by its {len(names)} names"
            )
        items = [(str(name), out_features // len(names)) for name in names]
    sizes = {name.rstrip("_"): size for name, size in items}
    if len(sizes) != len(items) or "" in sizes:
        raise ValueError(
            f"te_ops.Linear: parameters_split={parameters_split!r}: names must be distinct and not empty"
        )
    if sum(sizes.values()) != out_features or min(sizes.values()) < 0:
        raise ValueError(
            f"te_ops.Linear: parameters_split={parameters_split!r}: "
            f"sizes must add up to out_features={out_features}"
        )
    return sizes


class Linear(Module):
    """Applies ``y = x w^T + b`` to x of shape ``[*, in_features]``; the result is ``[*, out_features]``.

    Products are accumulated in fp32 and rounded once. Forward and backward each are one operator, so the
    layer traces as a whole graph under ``torch.compile(fullgraph=True)``, with outputs and gradients
    bit-equal to eager.

    dtypes: bf16, fp16 or fp32, the same for input and parameters. Under `torch.autocast`, fp32, bf16 and
    fp16 inputs and parameters are cast to the autocast dtype, as `torch.nn.Linear` does. fp32 follows
    PyTorch's TF32 setting.

    Differences from `torch.nn.Linear`: weights start from a normal distribution with standard deviation
    0.023 and biases from 0 (Transformer Engine's defaults; pass ``init_method`` for another), and the
    default device is CUDA where there is one. State dicts are interchangeable with `torch.nn.Linear`'s.

    Args:
        in_features: K, the size of each input row; 0 is allowed.
        out_features: N, the size of each output row.
        sequence_parallel: must be False in this version.
        fuse_wgrad_accumulation: accumulate the weight gradient into ``weight.main_grad``, a
            ``[out_features, in_features]`` tensor (fp32, bf16 or fp16) that the caller puts there, instead
            of ``weight.grad``, which stays None. The buffer is overwritten when forward got
            ``is_first_microbatch=True`` and added to otherwise.
        tp_group: must have one member in this version.
        tp_size: must be 1 in this version.
        get_rng_state_tracker: returns a tracker whose ``fork()`` context the initialization runs in.
        rng_tracker_name: the name passed to that ``fork()``.
        init_method: called with the weight to fill it; None is ``normal_(mean=0, std=0.023)``.
        bias: add a learnable bias.
        return_bias: do not add the bias but return ``(y, bias)``, so that the caller can fuse the addition.
        params_dtype: dtype of the parameters; None is `torch.get_default_dtype()`.
        parallel_mode: None, "column" or "row"; without effect while tp_size is 1.
        parameters_split: split weight and bias along dim 0 into parameters of their own: names, for equal
            parts, or a dict of name to rows. ``("query_", "key_")`` gives ``query_weight``, ``query_bias``, …
        device: where parameters are created. None: the device of an enclosing ``with torch.device(...)``,
            else CUDA if there is one, else CPU. "meta" defers; then ``to_empty()`` and `reset_parameters()`.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name,
            symmetric_ar_type: communication overlap; only the defaults work in this version.
        delay_wgrad_compute: leave the weight gradient out of backward; each `backward_dw()` call then
            computes it for the oldest backward that still waits.
        save_original_input: accepted for compatibility; without a quantized recipe the input is always
            what is saved.
        name: a name for error reports and debugging.

    Raises:
        ValueError: an argument has a value that cannot work; the message names it.
    """

    in_features: int
    out_features: int
    weight: Tensor  # these two where the parameters are not split
    bias: Tensor | None
    _fp8_state: Tensor
    _fp8_backward_state: Tensor
    _weight_token: tuple[int, int, int]
    _weight_in_graphs: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        later = "communication overlap is not in this version"
        refuse(
            "te_ops.Linear",
            sequence_parallel=(sequence_parallel, False, "sequence parallelism is not in this version"),
            tp_size=(tp_size, 1, "tensor parallelism is not in this version"),
            ub_overlap_ag=(ub_overlap_ag, False, later),
            ub_overlap_rs=(ub_overlap_rs, False, later),
            ub_overlap_rs_dgrad=(ub_overlap_rs_dgrad, False, later),
            ub_bulk_dgrad=(ub_bulk_dgrad, False, later),
            ub_bulk_wgrad=(ub_bulk_wgrad, False, later),
            ub_name=(ub_name, None, later),
            symmetric_ar_type=(symmetric_ar_type, None, later),
        )
        if tp_group is not None and tp_group.size() != 1:
            size = tp_group.size()
            raise ValueError(
                f"te_ops.Linear: tp_group has {size} members: tensor parallelism is not in this version"
            )
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(
                f"te_ops.Linear: parallel_mode={parallel_mode!r}: must be None, 'column' or 'row'"
            )
        for argument, value in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"te_ops.Linear: {argument}={value!r}: must be an integer >= 0")
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        if dtype not in _DTYPES:
            raise ValueError(
                f"te_ops.Linear: params_dtype={dtype}: must be one of {', '.join(map(str, _DTYPES))}"
            )

        self.in_features = in_features
        self.out_features = out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias = bias
        self.return_bias = return_bias
        self.parallel_mode = parallel_mode
        self.save_original_input = save_original_input
        self.name = name
        self._plain = not (fuse_wgrad_accumulation or delay_wgrad_compute or return_bias)
        self._init_method = (
            init_method if init_method is not None else partial(nn.init.normal_, mean=0.0, std=0.023)
        )
        self._get_rng_state_tracker = get_rng_state_tracker
        self._rng_tracker_name = rng_tracker_name
        self._wgrad_hooks: list[Callable[[], Any]] = []

        self._quantized = model_init.recipe is not None
        self._preserve_init = model_init.preserve
        self._weight_token, self._weight_in_graphs = _weight_cache.NOTHING, False

        where = default_device() if device is None else torch.device(device)
        sizes = _split_sizes(parameters_split, out_features)
        self._is_split = parameters_split is not None
        self.weight_names = tuple(f"{prefix}_weight" if prefix else "weight" for prefix in sizes)
        self.bias_names = tuple(f"{prefix}_bias" if prefix else "bias" for prefix in sizes)
        for weight_name, rows in zip(self.weight_names, sizes.values(), strict=True):
            weight = torch.empty(rows, in_features, dtype=dtype, device=where)
            if self._quantized:
                weight = quantize(weight.zero_(), pow2=_pow2_weights(model_init.recipe))
            self.register_parameter(weight_name, nn.Parameter(weight))
        for bias_name, rows in zip(self.bias_names, sizes.values(), strict=True):
            values = nn.Parameter(torch.empty(rows, dtype=dtype, device=where)) if bias else None
            self.register_parameter(bias_name, values)
        self._wgrad_token = _deferred.new_token(self) if delay_wgrad_compute else None
        self._history_len = _delayed.DEFAULT_LEN
        for buffer in _delayed.BUFFERS:
            self.register_buffer(buffer, _delayed.new_state(where), persistent=False)
        _delayed.register(self)
        if where.type != "meta":
            region(self._fp8_state.device)  # exists before anything can be traced or captured
            self.reset_parameters()

    # ------------------------------------------------------------------------------ parameters --------

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fills the weights by ``init_method`` and the biases with 0.

        Split weights are initialized as one tensor, so that fan-in and fan-out are the layer's.
        """
        if defer_init:
            return
        tracker = self._get_rng_state_tracker
        if tracker is None:
            fork: Any = nullcontext()
        else:
            fork = tracker().fork(self._rng_tracker_name) if self._rng_tracker_name else tracker().fork()
        _delayed.reset(self._fp8_state)
        _delayed.reset(self._fp8_backward_state)
        weights = [self.get_parameter(name) for name in self.weight_names]
        with torch.no_grad():
            with fork:
                if not self._is_split and not self._quantized:
                    self._init_method(weights[0])
                else:
                    rows = [w.shape[0] for w in weights]
                    whole = torch.empty(
                        sum(rows), self.in_features, dtype=weights[0].dtype, device=weights[0].device
                    )
                    self._init_method(whole)
                    for weight, part in zip(weights, whole.split(rows), strict=True):
                        weight.copy_(part)
                        if self._preserve_init and isinstance(weight, QuantizedTensor):
                            weight.high_precision_init_val = part.cpu()
            for name in self.bias_names:
                if self.use_bias:
                    self.get_parameter(name).zero_()

    def make_weight_cache(self) -> None:
        """Makes the buffers of ``is_first_microbatch`` now; else the first call that wants them does.

        ``torch.compile(mode="reduce-overhead")`` needs this, or one eager call: memory that its graphs allocate is
        theirs. Does nothing where nothing is cached: with ``parameters_split`` and for quantized parameters.
        """
        if not self._is_split and not self._quantized:
            _weight_cache.make(self, self.weight)

    def _weight_parts(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self.weight_names]

    def _joined(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of split parameters; autograd hands each part its rows of the gradient."""
        bias = torch.cat([getattr(self, name) for name in self.bias_names]) if self.use_bias else None
        return torch.cat([*self._weight_parts()]), bias

    def _main_grads(self) -> list[Tensor]:
        grads = []
        for name in self.weight_names:
            weight = getattr(self, name)
            grad = getattr(weight, "main_grad", None)
            if grad is None:
                raise RuntimeError(
                    f"te_ops.Linear: fuse_wgrad_accumulation=True, but {name}.main_grad is not set: "
                    f"give it a tensor of shape {list(weight.shape)} before the forward"
                )
            grads.append(grad)
        return grads

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Linear:
        _weight_cache.drop(self)  # a conversion of dtypes would take codes for values
        super()._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Linear:
        clone = cast(Linear, super().__deepcopy__(memo))
        clone._weight_token, clone._weight_in_graphs = _weight_cache.NOTHING, False
        _delayed.register(clone)
        if self.delay_wgrad_compute:  # what waits stays with the original
            clone._wgrad_token = _deferred.new_token(clone)
        return clone

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._weight_token = _weight_cache.NOTHING
        _delayed.register(self)
        if self.delay_wgrad_compute:
            self._wgrad_token = _deferred.new_token(self)

    # --------------------------------------------------------------------------------- running --------

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Returns y of shape ``[*, out_features]``, or ``(y, bias)`` with ``return_bias=True``.

        Args:
            inp: ``[*, in_features]``: 1-D to N-D, any strides, any number of rows.
            is_first_microbatch: under a recipe, True quantizes the weight and keeps the codes, False uses them (and
                quantizes again if the weight has changed), None keeps nothing. With ``fuse_wgrad_accumulation``,
                True overwrites ``main_grad``, False and None add to it.
            fp8_output: return y as a `QuantizedTensor`; under a recipe only.
            fp8_grad: hand the gradient of `inp` on as a `QuantizedTensor`; under a recipe only.

        Raises:
            RuntimeError: a wrong dtype, device, rank or size; the message names slot, value and rule.
        """
        if not isinstance(inp, Tensor) or inp.is_nested:
            _refuse_input(inp)
        weight, bias = self._joined() if self._is_split else (self.weight, self.bias)
        if active.depth or self._quantized or type(inp) is QuantizedTensor or fp8_output or fp8_grad:
            recipe = active.recipe
            if recipe is not None:
                y = forward_fp8(
                    self, inp, weight, None if self.return_bias else bias, recipe, is_first_microbatch,
                    fp8_output, fp8_grad,
                )  # fmt: skip
                return (y, bias) if self.return_bias else y
            refuse(
                "te_ops.Linear",
                fp8_output=(fp8_output, False, "no recipe is active; use te_ops.autocast"),
                fp8_grad=(fp8_grad, False, "no recipe is active; use te_ops.autocast"),
            )
            inp, weight = plain(inp), plain(weight)
            if active.calibrating and active.calibration_recipe is not None:
                stage_amaxes(self, inp, weight, active.calibration_recipe)
        # Without an argument it asks for CUDA, in half the time.
        if torch.is_autocast_enabled() if inp.is_cuda else torch.is_autocast_enabled("cpu"):
            inp, weight, bias = _autocast(inp, weight, bias)
        if self._plain:
            return apply_linear(inp, weight, bias) if torch.is_grad_enabled() else forward(inp, weight, bias)
        b = None if self.return_bias else bias
        if not torch.is_grad_enabled():
            y = forward(inp, weight, b)
        elif not self.fuse_wgrad_accumulation and self._wgrad_token is None:
            y = apply_linear(inp, weight, b)
        else:
            token = self._wgrad_token
            fused = self.fuse_wgrad_accumulation and token is None and weight.requires_grad
            main_grads = self._main_grads() if fused else ()
            y = LinearWgradElsewhere.apply(
                inp, weight, b, token, is_first_microbatch is not True, *main_grads
            )
        return (y, bias) if self.return_bias else y

    # ------------------------------------------------------------------ delayed weight gradients --------

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw()` has to be called after backward."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after each `backward_dw()` has updated the gradients."""
        self._wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Computes the weight gradient of the oldest backward that still waits, and accumulates it.

        It goes to ``weight.grad``, or with ``fuse_wgrad_accumulation`` to ``weight.main_grad``. Does
        nothing without ``delay_wgrad_compute``.

        Raises:
            RuntimeError: no backward is waiting.
        """
        if self._wgrad_token is None:
            return
        entry = _deferred.pop(self._wgrad_token)
        if entry is None:
            raise RuntimeError("te_ops.Linear: backward_dw() was called, but no backward is waiting for it")
        with torch.no_grad():
            if self.fuse_wgrad_accumulation:
                deferred_into(entry, self._main_grads())
            else:
                dw = deferred_product(entry, self._weight_parts()[0].dtype)
                parts = self._weight_parts()
                for weight, grad in zip(parts, dw.split([w.shape[0] for w in parts]), strict=True):
                    if not weight.requires_grad:
                        continue
                    grad = grad.to(weight.dtype)
                    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        for hook in self._wgrad_hooks:
            hook()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
